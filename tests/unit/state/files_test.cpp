// Weights and buffers as pieces, in files: what checkpoints of whole models stand on.
#include "lockstep/state/files.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/shard/flat.h"
#include "lockstep/testing/checks.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::detail {
namespace {

using testing::expect_error;
using testing::TempDir;

constexpr int64_t kSave = 77;

/// Three tensors of a module: a matrix, one in another memory format, a counter.
std::vector<at::Tensor> made_tensors() {
  return {at::randn({5, 3}), at::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast),
          at::full({}, int64_t{12}, at::kLong)};
}
const std::vector<std::string> kNames = {"fc.weight", "conv.weight", "bn.num_batches_tracked"};

void write(PartWriter& part, const StatePiece& piece) {
  const auto description = described(piece);
  part.take(description, "", 0, {});
  for (const auto& [name, value] : piece.values) part.take(description, name, 0, bytes_of_state(value.toTensor()));
}

/// As two ranks would save them: each a slice of the first two, the second rank the counter.
void save(const std::string& path, const std::vector<at::Tensor>& tensors) {
  StateIndex index{.save_id = kSave};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    index.tensors.push_back({kNames[i], tensors[i].sizes().vec(), tensors[i].strides().vec()});
  }
  for (int64_t rank = 0; rank < 2; ++rank) {
    PartWriter part(path, rank, kSave);
    for (int64_t i = 0; i < 2; ++i) {
      const auto row = row_of(tensors[i]);
      const ElementRange mine = rank == 0 ? ElementRange{0, 7} : ElementRange{7, row.numel()};
      write(part, weight_piece(i, kNames[i], row.narrow(0, mine.begin, mine.size()), mine));
    }
    if (rank == 1) write(part, weight_piece(2, kNames[2], tensors[2]));
    const auto placed = part.finish();
    index.pieces.insert(index.pieces.end(), placed.begin(), placed.end());
  }
  write_index(path, index);
}

// A momentum that began as a transposed gradient lies in memory unlike its parameter.
TEST(StateFiles, HoldStateThatLiesUnlikeItsParameter) {
  const TempDir folder;
  const auto path = folder.file("state");
  const std::vector<at::Tensor> parameters = {at::randn({2, 3})};
  const auto momentum = at::randn({3, 2}).t();
  PartWriter part(path, 0, kSave);
  write(part, weight_piece(0, "weight", momentum));
  write_index(path, {.save_id = kSave, .tensors = {{"weight", {2, 3}, {3, 1}}}, .pieces = part.finish()});
  const auto read = read_index(path);
  const auto source = source_of(path, read, parameters);
  EXPECT_TRUE(at::equal(source(0, {0, 6}, true)->at(kWeight).toTensor(), momentum));
  EXPECT_TRUE(at::equal(source(0, {1, 5}, false)->at(kWeight).toTensor(), momentum.reshape({-1}).slice(0, 1, 5)));
}

TEST(StateFiles, HoldWeightsByName) {
  const TempDir folder;
  const auto path = folder.file("weights");
  const auto tensors = made_tensors();
  save(path, tensors);

  const auto index = read_index(path);
  EXPECT_EQ(index.names(), kNames);
  for (const auto& placed : index.pieces) EXPECT_EQ(placed.piece.name, kNames[placed.piece.index]);
  // Wanted in another order, and all of them contiguous.
  const std::vector<std::string> wanted = {kNames[2], kNames[0], kNames[1]};
  std::vector<at::Tensor> into = {at::zeros({}, at::kLong), at::zeros({5, 3}), at::zeros({2, 3, 4, 4})};
  const auto saved_at = indices_by_name(wanted, index.names(), "test");
  EXPECT_EQ(saved_at, (std::vector<int64_t>{2, 0, 1}));
  std::vector<at::Tensor> as_saved(3);
  for (std::size_t i = 0; i < into.size(); ++i) as_saved[saved_at[i]] = into[i];
  const auto source = with_indices(source_of(path, index, as_saved), saved_at);
  for (std::size_t i = 0; i < into.size(); ++i) {
    const auto whole = source(static_cast<int64_t>(i), {0, into[i].numel()}, true)->at(kWeight).toTensor();
    EXPECT_TRUE(at::equal(whole, tensors[saved_at[i]])) << wanted[i];
    EXPECT_EQ(whole.strides(), into[i].strides());
    EXPECT_EQ(whole.scalar_type(), into[i].scalar_type());
  }
  // A slice across the border of what the two had.
  const auto slice = source(1, {4, 11}, false)->at(kWeight).toTensor();
  EXPECT_TRUE(at::equal(slice, tensors[0].flatten().narrow(0, 4, 7)));
}

TEST(StateFiles, HoldWeightsAndOptimizerStateInOneSave) {
  const TempDir folder;
  const auto path = folder.file("both");
  const auto weight = at::randn({4});
  StateIndex index{.save_id = kSave, .groups = {.param_groups = {{.options = {{"lr", 0.5}}, .params = {0}}}}};
  index.tensors = {{"w", {4}, {1}}, {"w", {4}, {1}}};
  PartWriter part(path, 0, kSave);
  write(part, {.index = 0, .name = "w", .elements = {0, 4}, .values = {{"momentum_buffer", at::ones({4})}}});
  write(part, weight_piece(1, "w", weight));
  index.pieces = part.finish();
  write_index(path, index);

  const auto read = read_index(path);
  EXPECT_EQ(read.groups.param_groups.at(0).options.at("lr").toDouble(), 0.5);
  const std::vector<at::Tensor> tensors = {weight, weight};
  const auto source = source_of(path, read, tensors);
  EXPECT_TRUE(at::equal(source(0, {0, 4}, true)->at("momentum_buffer").toTensor(), at::ones({4})));
  EXPECT_TRUE(at::equal(source(1, {1, 3}, false)->at(kWeight).toTensor(), weight.narrow(0, 1, 2)));
}

TEST(StateFiles, KnowPiecesThatWereWrittenWithoutNames) {
  const StatePiece piece{.index = 3, .name = "w", .elements = {1, 5}, .is_whole = false, .values = {{"step", 2}}};
  const auto again = pieces_from(to_ivalue(std::vector<StatePiece>{piece})).at(0);
  EXPECT_EQ(again.name, "w");
  EXPECT_EQ(again.elements, piece.elements);
  c10::impl::GenericDict values(c10::StringType::get(), c10::AnyType::get());
  values.insert("step", 2);
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(c10::ivalue::Tuple::create({3, 1, 5, false, values}));
  const auto old = pieces_from(list).at(0);
  EXPECT_EQ(old.name, "");
  EXPECT_EQ(old.index, 3);
  EXPECT_EQ(old.values.at("step").toInt(), 2);
}

TEST(StatePieces, OfWeightsMakeTheWhole) {
  const auto tensors = made_tensors();
  StateByIndex collected;
  const auto row = row_of(tensors[1]);
  add_piece(collected, weight_piece(1, kNames[1], row.narrow(0, 50, row.numel() - 50), {50, row.numel()}), tensors[1]);
  add_piece(collected, weight_piece(1, kNames[1], row.narrow(0, 0, 50), {0, 50}), tensors[1]);
  add_piece(collected, weight_piece(2, kNames[2], tensors[2]), tensors[2]);
  EXPECT_TRUE(at::equal(collected.at(1).at(kWeight).toTensor(), tensors[1]));
  EXPECT_EQ(collected.at(2).at(kWeight).toTensor().item<int64_t>(), 12);
  expect_error([&] { weight_piece(0, "w", tensors[0], {0, 15}); }, {"'w'", "[5, 3]"});
}

TEST(StateNames, FindWhatWasSaved) {
  using Indices = std::vector<int64_t>;
  EXPECT_EQ(indices_by_name({"a", "b"}, {"b", "a"}, "test"), (Indices{1, 0}));
  EXPECT_EQ(indices_by_name({"a", "b"}, {"", ""}, "test"), (Indices{0, 1})) << "saved without names";
  EXPECT_EQ(indices_by_name({"", ""}, {"b", "a"}, "test"), (Indices{0, 1})) << "loaded without names";
  EXPECT_EQ(indices_by_name({"b"}, {"a", "b", "c"}, "test"), (Indices{1})) << "some of what was saved";
  expect_error([] { indices_by_name({"a", "x"}, {"a", "b"}, "test"); }, {"test: parameter 'x'", "'b' is"});
  expect_error([] { indices_by_name({"", "a"}, {"a", "b"}, "test"); }, {"would get the state of another one"});
}

}  // namespace
}  // namespace lockstep::detail
