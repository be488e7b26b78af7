# The reduction kernels of shm: one source compiled for each instruction set, and the file that chooses between them.

function(lockstep_add_reduce_kernels target)
  set(dir "${CMAKE_CURRENT_SOURCE_DIR}/lockstep/shm/optional")
  set(flags_baseline)
  set(flags_avx2 -mavx2 -mf16c)
  set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    set(sets baseline avx2 avx512)
    target_sources(${target} PRIVATE "${dir}/instruction_sets_x86.cpp")
  else()
    set(sets baseline)
    target_sources(${target} PRIVATE "${dir}/instruction_sets_other.cpp")
  endif()
  # Same bits for every set: nothing fused. Fast in debug builds too: -O3 overrides the build type's level.
  set(flags -O3 -ffp-contract=off -fopenmp-simd)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(APPEND flags -Wno-pass-failed)  # a loop that no instruction of the set fits stays scalar
  endif()
  foreach(set IN LISTS sets)
    target_sources(${target} PRIVATE "${dir}/reduce_${set}.cpp")
    set_source_files_properties("${dir}/reduce_${set}.cpp" PROPERTIES
      COMPILE_OPTIONS "${flags};${flags_${set}}"
      SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
endfunction()
