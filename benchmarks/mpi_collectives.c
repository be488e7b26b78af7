// The same operations and sizes with Open MPI, timed and printed as benchmarks/collectives/rank.cpp does it:
//   mpirun -np 2 mpi_collectives allreduce 0.2 4 1024 65536
// measures each size for about 0.2 seconds and prints samples lines.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double kSampleSeconds = 0.002;
static const long kMostCalls = 20000;
static const long kUncachedBytes = 128 << 20;
enum { kFewestSamples = 2, kMostSamples = 15 };

static int rank, ranks;
static const char* operation;
static float* input;
static float* output;
static long share;  // elements per rank; for allreduce, of the whole

static void call(void) {
  if (strcmp(operation, "allreduce") == 0) {
    MPI_Allreduce(MPI_IN_PLACE, output, (int)share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  } else if (strcmp(operation, "allgather") == 0) {
    MPI_Allgather(input, (int)share, MPI_FLOAT, output, (int)share, MPI_FLOAT, MPI_COMM_WORLD);
  } else {
    MPI_Reduce_scatter_block(input, output, (int)share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
}

static float* filled(long numel, float value) {
  float* values = malloc((size_t)numel * sizeof(float));
  if (!values) MPI_Abort(MPI_COMM_WORLD, 1);
  for (long i = 0; i < numel; ++i) values[i] = value;
  return values;
}

/// Does the operation once, ends the program if the result is wrong, and leaves zeros.
static void prepare_and_check(long bytes) {
  const int gathers = strcmp(operation, "allgather") == 0;
  const int reduces_all = strcmp(operation, "allreduce") == 0;
  share = bytes / (long)sizeof(float) / (reduces_all ? 1 : ranks);
  if (share < 1) share = 1;
  const long inputs = reduces_all ? 1 : gathers ? share : share * ranks;
  const long outputs = gathers ? share * ranks : share;
  input = filled(inputs, (float)(rank + 1));
  output = filled(outputs, (float)(rank + 1));
  call();
  const float sum = (float)(ranks * (ranks + 1) / 2);
  for (long i = 0; i < outputs; ++i) {
    const float expected = gathers ? (float)(i / share + 1) : sum;
    if (output[i] != expected) {
      fprintf(stderr, "%s of %ld bytes is wrong at %ld\n", operation, bytes, i);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  memset(input, 0, (size_t)inputs * sizeof(float));
  memset(output, 0, (size_t)outputs * sizeof(float));
}

static double time_calls(long bytes, long calls) {
  MPI_Barrier(MPI_COMM_WORLD);
  if (bytes < kUncachedBytes) call();
  const double start = MPI_Wtime();
  for (long i = 0; i < calls; ++i) call();
  return MPI_Wtime() - start;
}

static double choose_sample_size(long bytes, long* calls) {
  for (*calls = 1;;) {
    double seconds = time_calls(bytes, *calls);
    MPI_Bcast(&seconds, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    if (seconds >= kSampleSeconds || *calls == kMostCalls) return seconds;
    double growth = 1.2 * kSampleSeconds / seconds;
    growth = growth < 2 ? 2 : growth > 20 ? 20 : growth;
    *calls = (long)((double)*calls * growth);
    if (*calls > kMostCalls) *calls = kMostCalls;
  }
}

static void measure(long bytes, double seconds) {
  long calls;
  double times[kMostSamples];
  const double sample_seconds = choose_sample_size(bytes, &calls) * (1 + 1.0 / (double)calls);
  long count = (long)(seconds / sample_seconds);
  count = count < kFewestSamples ? kFewestSamples : count > kMostSamples ? kMostSamples : count;
  for (long sample = 0; sample < count; ++sample) times[sample] = time_calls(bytes, calls) / (double)calls;
  double slowest[kMostSamples];
  MPI_Reduce(times, slowest, (int)count, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank != 0) return;
  printf("samples %s %ld mpi", operation, bytes);
  for (long sample = 0; sample < count; ++sample) printf(" %.9g", slowest[sample]);
  printf("\n");
  fflush(stdout);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc < 4) {
    fprintf(stderr, "usage: mpi_collectives allreduce|allgather|reducescatter SECONDS BYTES...\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  operation = argv[1];
  // The count depends on rank 0's time only, so every rank takes the same number of samples.
  for (int i = 3; i < argc; ++i) {
    prepare_and_check(atol(argv[i]));
    measure(atol(argv[i]), atof(argv[2]));
    free(input);
    free(output);
  }
  if (rank == 0) {
    printf("delivered\n");
    fflush(stdout);
  }
  MPI_Finalize();
  return 0;
}
