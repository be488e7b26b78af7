// Files go both ways between here and Python: its safetensors reads what is written here and writes what is read here,
// in all dtypes, and so does its torch.distributed.checkpoint with shards.
#include "lockstep/checkpoint/weights.h"
#include "tests/support/checkpoint_runs.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::checkpoint_formats_test {

using namespace checkpoint_runs;
using oracle::at_key;

bool has_safetensors() {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  if (python == nullptr || *python == '\0') return false;
  return std::system(str("'", python, "' -c 'import safetensors' 2>/dev/null").c_str()) == 0;
}

class Formats : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_safetensors()) GTEST_SKIP() << "there is no Python with safetensors to compare with";
  }
  /// What a script of this folder saved.
  static c10::IValue run(const std::string& script, const std::string& argument) {
    return oracle::run_reference("checkpoint/" + script, argument);
  }

  const testing::TempDir folder_;
};

using Tensors = std::map<std::string, at::Tensor>;

/// Given tensors, or whatever tensors there are.
class Held : public dcp::Stateful {
 public:
  explicit Held(Tensors given = {}) : tensors(std::move(given)) {}
  void save(dcp::Outgoing& out) override {
    for (const auto& [name, tensor] : tensors) out.tensor(name, tensor);
  }
  void load(dcp::Incoming& in) override {
    for (const auto& name : in.names()) {
      if (in.form(name)) {
        tensors[name] = in.tensor(name);
      } else {
        in.pass_over(name);
      }
    }
  }
  Tensors tensors;
};

Tensors loaded_from(const std::string& path) {
  Held held;
  dcp::State state;
  state.add("", held);
  dcp::load(path, state);
  return held.tensors;
}

/// As Python calls it.
std::string dtype_name(at::ScalarType type) {
  static const std::map<at::ScalarType, std::string> kNames = {{at::kDouble, "float64"},
                                                               {at::kFloat, "float32"},
                                                               {at::kHalf, "float16"},
                                                               {at::kBFloat16, "bfloat16"},
                                                               {at::kFloat8_e4m3fn, "float8_e4m3fn"},
                                                               {at::kFloat8_e5m2, "float8_e5m2"},
                                                               {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
                                                               {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
                                                               {at::kFloat8_e8m0fnu, "float8_e8m0fnu"},
                                                               {at::kComplexFloat, "complex64"},
                                                               {at::kLong, "int64"},
                                                               {at::kInt, "int32"},
                                                               {at::kShort, "int16"},
                                                               {at::kChar, "int8"},
                                                               {at::kUInt64, "uint64"},
                                                               {at::kUInt32, "uint32"},
                                                               {at::kUInt16, "uint16"},
                                                               {at::kByte, "uint8"},
                                                               {at::kBool, "bool"}};
  const auto found = kNames.find(type);
  return found == kNames.end() ? "none" : "torch." + found->second;
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

/// `described` by a script: dtype, sizes and bytes by name.
void expect_same(const Tensors& here, const c10::IValue& described) {
  const auto there = described.toGenericDict();
  EXPECT_EQ(here.size(), there.size());
  for (const auto& [name, tensor] : here) {
    ASSERT_TRUE(there.contains(name)) << name;
    const auto about = there.at(name);
    const auto parts = about.toListRef();
    EXPECT_EQ(dtype_name(tensor.scalar_type()), parts[0].toStringRef()) << name;
    std::vector<int64_t> sizes;
    for (const auto& size : parts[1].toListRef()) sizes.push_back(size.toInt());
    EXPECT_EQ(tensor.sizes().vec(), sizes) << name;
    EXPECT_EQ(bytes_of(tensor), bytes_of(parts[2].toTensor())) << name;
  }
}

Tensors of_all_dtypes() {
  Tensors tensors = {{"scalar", at::scalar_tensor(1.5)},
                     {"empty", at::empty({0, 3})},
                     {"flag", at::ones({}, at::kBool)},
                     {"permuted", at::randn({2, 3, 4}).permute({2, 0, 1})},
                     {"special", at::tensor({std::nanf(""), -0.0F, INFINITY, 1e-45F})},
                     {"a.dotted.näme \"quoted\"", at::arange(7)}};
  for (const auto type :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz,
        at::kFloat8_e5m2fnuz, at::kFloat8_e8m0fnu, at::kComplexFloat, at::kLong, at::kInt, at::kShort, at::kChar,
        at::kUInt64, at::kUInt32, at::kUInt16, at::kByte, at::kBool}) {
    tensors[lockstep::str("of ", type)] = (at::randn({3, 5}) * 4).abs().to(type);
  }
  return tensors;
}

TEST_F(Formats, PythonReadsTheBitsThatAreWrittenHere) {
  auto tensors = of_all_dtypes();
  Held held(tensors);
  dcp::State state;
  state.add("", held);
  dcp::save(folder_.file("saved"), state);
  const auto read = run("read_file.py", folder_.file("saved/rank-00000.safetensors"));
  expect_same(tensors, at_key(read, "tensors"));
  EXPECT_EQ(at_key(at_key(read, "metadata"), "format").toStringRef(), "pt");
}

TEST_F(Formats, PythonReadsPairsForWideComplexNumbers) {
  const auto complex = at::randn({3}, at::kComplexDouble);
  Held held({{"complex", complex}});
  dcp::State state;
  state.add("", held);
  dcp::save(folder_.file("saved"), state);
  const auto read = run("read_file.py", folder_.file("saved/rank-00000.safetensors"));
  expect_same({{"complex", at::view_as_real(complex)}}, at_key(read, "tensors"));
}

TEST_F(Formats, PythonReadsWeights) {
  const auto model = net(1);
  save_weights(model, folder_.file("weights"));
  Tensors tensors;
  for (const auto& item : model->named_parameters()) tensors[item.key()] = item.value().detach();
  for (const auto& item : model->named_buffers()) tensors[item.key()] = item.value();
  tensors.erase("norm.bias");  // tied, and known by the first of its names
  const auto first = model->named_parameters().keys();
  if (std::find(first.begin(), first.end(), "tied") > std::find(first.begin(), first.end(), "norm.bias")) {
    tensors["norm.bias"] = tensors.at("tied");
    tensors.erase("tied");
  }
  expect_same(tensors, at_key(run("read_file.py", folder_.file("weights/model.safetensors")), "tensors"));
}

TEST_F(Formats, BitsThatPythonWritesAreReadHere) {
  const auto written = run("write_files.py", folder_.path());
  expect_same(loaded_from(folder_.file("all.safetensors")), written);
  expect_same(loaded_from(folder_.file("hf")), written);
}

TEST_F(Formats, PythonReadsShardsOfAnyLayout) {
  std::map<std::string, Tensors> written;
  for (const auto& layout : layouts()) {
    for (const int ranks : {2, 3}) {
      const auto name = str(layout, " on ", ranks);
      const auto path = folder_.file(name);
      testing::run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
        TrainingRun training(layout, world, 1);
        training.step();
        dcp::save(path, training.state());
      });
      written[name] = loaded_from(path);
    }
  }
  const auto read = run("read_shards.py", folder_.path());
  for (const auto& [layout, here] : written) {
    SCOPED_TRACE(layout);
    const auto there = oracle::tensors_by_name(at_key(read, layout));
    EXPECT_EQ(here.size(), there.size());
    EXPECT_TRUE(here.contains("optimizer.state.up.weight.exp_avg"));
    for (const auto& [name, tensor] : here) {
      ASSERT_TRUE(there.contains(name)) << name;
      EXPECT_TRUE(tensor.equal(there.at(name))) << name;
    }
  }
}

class PythonShards : public Formats {
 protected:
  void SetUp() override {
    Formats::SetUp();
    if (!IsSkipped()) expected_ = oracle::tensors_by_name(run("write_shards.py", path()));
  }
  std::string path() const { return folder_.file("shards"); }
  void expect_loaded(const Net& model) const {
    for (const auto& item : model->named_parameters()) {
      const auto& wanted = expected_.at(item.key() == "tied" ? "norm.bias" : item.key());
      const auto layout = layout_of(item.value());
      EXPECT_TRUE(item.value().detach().equal(layout ? layout->cut(wanted) : wanted)) << item.key();
    }
    for (const auto& item : model->named_buffers()) EXPECT_TRUE(item.value().equal(expected_.at(item.key())));
  }

  Tensors expected_;
};

TEST_F(PythonShards, AreLoaded) {
  auto model = net(2);
  dcp::State state;
  state.add("", model);
  dcp::load(path(), state);
  expect_loaded(model);
  auto other = net(3);
  load_weights(other, path());
  expect_loaded(other);
}

TEST_F(PythonShards, AreLoadedInOtherLayouts) {
  for (const auto* layout : {"fsdp", "tp", "2-D"}) {
    for (const int ranks : {2, 3}) {
      testing::run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
        TrainingRun training(layout, world, 2);
        load_weights(training.model, path());
        expect_loaded(training.model);
      });
    }
  }
}

}  // namespace lockstep::checkpoint_formats_test
