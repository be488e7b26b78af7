#include "lockstep/rpc/shm_agent_record.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <random>

namespace lockstep::rpc::shm_agent_record_test {
namespace {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;
using MessagePtr = c10::intrusive_ptr<Message>;

MessagePtr message_of(std::vector<at::Tensor> tensors, const std::string& payload = "payload") {
  return c10::make_intrusive<Message>(std::vector<char>(payload.begin(), payload.end()), std::move(tensors),
                                      MessageType::SCRIPT_CALL);
}

std::vector<std::byte> written(const Message& message) {
  const MessageRecord record(message);
  std::vector<std::byte> bytes(record.bytes());
  record.write(bytes.data());
  return bytes;
}

MessagePtr sent(const MessagePtr& message) {
  return read_message(written(*message), 17);
}

// RPC-14
TEST(ShmAgentRecord, BringsTensorsOfAnyDtypeShapeAndStrides) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kBool, at::kByte,
                           at::kComplexFloat, at::kUInt16}) {
    const auto base = at::arange(24, at::kFloat).to(dtype).view({2, 3, 4});
    std::vector<at::Tensor> tensors = {base,
                                       base.transpose(0, 2),
                                       base.slice(2, 1, 3),
                                       base.select(0, 1).select(0, 1).select(0, 1),
                                       base.view({24}).expand({2, 24}),
                                       base.slice(0, 0, 0),
                                       at::empty({0, 5}, dtype),
                                       {}};
    const auto got = sent(message_of(tensors));
    ASSERT_EQ(got->tensors().size(), tensors.size());
    for (std::size_t i = 0; i + 1 < tensors.size(); ++i) {
      const auto& tensor = got->tensors()[i];
      EXPECT_EQ(tensor.scalar_type(), dtype);
      EXPECT_EQ(tensor.sizes(), tensors[i].sizes());
      EXPECT_TRUE(tensor.equal(tensors[i])) << dtype << " " << i;
      EXPECT_NE(tensor.storage().data(), base.storage().data());
    }
    EXPECT_EQ(got->tensors()[1].strides(), tensors[1].strides());
    EXPECT_FALSE(got->tensors().back().defined());
    EXPECT_EQ(std::string(got->payload().begin(), got->payload().end()), "payload");
    EXPECT_EQ(got->type(), MessageType::SCRIPT_CALL);
    EXPECT_EQ(got->id(), 17);
  }
}

TEST(ShmAgentRecord, KeepsRequiresGradOfLeavesAndResults) {
  const auto leaf = at::ones({3}).set_requires_grad(true);
  const auto got = sent(message_of({leaf, leaf * 2, at::ones({3})}));
  EXPECT_TRUE(got->tensors()[0].requires_grad());
  EXPECT_TRUE(got->tensors()[1].requires_grad());
  EXPECT_TRUE(got->tensors()[1].is_leaf());
  EXPECT_FALSE(got->tensors()[2].requires_grad());
}

// RPC-19
TEST(ShmAgentRecord, SendsOfAViewOnlyWhatItShows) {
  const auto large = at::rand({1000, 1000});
  EXPECT_LT(MessageRecord(*message_of({large.select(1, 3)})).bytes(), 1000 * 4 + 300U);
  EXPECT_LT(MessageRecord(*message_of({large.slice(0, 1, 2)})).bytes(), 1000 * 4 + 300U);
  const auto got = sent(message_of({large.select(1, 3)}));
  EXPECT_TRUE(got->tensors()[0].equal(large.select(1, 3)));
  EXPECT_EQ(got->tensors()[0].storage().nbytes(), 4000U);
}

// RPC-14
TEST(ShmAgentRecord, LeavesOtherTensorsToLibtorch) {
  const auto sparse = at::eye(4).to_sparse();
  const auto complex = at::complex(at::ones({2}), at::ones({2})).conj();
  const auto got = sent(message_of({at::ones({2}), sparse, complex}));
  EXPECT_TRUE(got->tensors()[0].equal(at::ones({2})));
  EXPECT_TRUE(got->tensors()[1].is_sparse());
  EXPECT_TRUE(got->tensors()[1].to_dense().equal(at::eye(4)));
  EXPECT_TRUE(got->tensors()[2].equal(complex));
  EXPECT_EQ(std::string(got->payload().begin(), got->payload().end()), "payload");
}

TEST(ShmAgentRecord, RefusesTensorsOnOtherDevicesNamingTheRemedy) {
  try {
    const MessageRecord record(*message_of({at::empty({2}, at::device(at::kMeta))}));
    FAIL() << "a meta tensor was taken";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("Use the TensorPipe agent with a device map"), std::string::npos)
        << error.what();
  }
}

/// Reads what may be anything; counts whether it was a message.
bool is_readable(std::span<const std::byte> record) {
  // Exactly as long as it says, so that a sanitizer sees who reads on.
  const auto own = std::make_unique<std::byte[]>(record.size());
  std::memcpy(own.get(), record.data(), record.size());
  try {
    const auto message = read_message({own.get(), record.size()}, 1);
    for (const auto& tensor : message->tensors()) {
      if (tensor.defined()) tensor.clone();
    }
    return true;
  } catch (const BadRecord&) {
    return false;
  }
}

TEST(ShmAgentRecord, ReadsAHundredThousandSpoiledRecordsWithoutHarm) {
  const auto base = at::arange(24, at::kFloat).view({2, 3, 4});
  const std::vector<std::vector<std::byte>> seeds = {
      written(*message_of({base, base.transpose(0, 2), {}, at::empty({0, 3})})),
      written(*message_of({at::tensor(1.0), base.to(at::kLong).slice(2, 0, 2), base.clone().set_requires_grad(true)},
                          std::string(100, 'p'))),
      written(*message_of({}, "")),
      written(*message_of({at::eye(3).to_sparse()})),
  };
  for (const auto& seed : seeds) EXPECT_TRUE(is_readable(seed));
  std::mt19937 random(42);
  const int64_t odd[] = {0, 1, -1, 2, 63, 64, 65, 1LL << 31, 1LL << 32, 1LL << 62, INT64_MAX, INT64_MIN};
  int readable = 0;
  for (int i = 0; i < 100'000; ++i) {
    auto record = seeds[random() % seeds.size()];
    for (unsigned changes = 1 + random() % 3; changes > 0 && !record.empty(); --changes) {
      // Mostly in front, where the lengths are.
      const auto at = random() % (random() % 4 == 0 ? record.size() : std::min<std::size_t>(record.size(), 160));
      switch (random() % 4) {
        case 0:
          record[at] = static_cast<std::byte>(random());
          break;
        case 1:
          record[at] ^= static_cast<std::byte>(1U << random() % 8);
          break;
        case 2: {
          const auto word = at / 8 * 8;
          if (word + 8 <= record.size()) std::memcpy(&record[word], &odd[random() % std::size(odd)], 8);
          break;
        }
        default:
          record.resize(random() % 2 == 0 ? at : record.size() + random() % 64);
      }
    }
    readable += is_readable(record) ? 1 : 0;
  }
  // Changed elements are none of the reader's business.
  EXPECT_GT(readable, 1000);
  EXPECT_LT(readable, 90'000);
}

TEST(ShmAgentRecord, SaysWhatIsWrongWithARecord) {
  auto record = written(*message_of({at::ones({4})}, ""));
  const auto expect = [](std::span<const std::byte> bytes, const char* text) {
    try {
      read_message(bytes, 1);
      ADD_FAILURE() << "no error about " << text;
    } catch (const BadRecord& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect(std::span(record).first(10), "a message's head of 32 bytes where 10 are left");
  expect(std::span(record).first(record.size() - 1), "a tensor of 16 bytes where 15 are left");
  auto large = record;
  const int64_t size = int64_t{1} << 40;
  std::memcpy(&large[40], &size, 8);
  expect(large, "a tensor of 4398046511104 bytes where 16 are left");
  auto stride = record;
  const int64_t two = 2;
  std::memcpy(&stride[48], &two, 8);
  expect(stride, "a tensor of 4 elements whose strides reach over 7");
}

}  // namespace
}  // namespace lockstep::rpc::shm_agent_record_test
