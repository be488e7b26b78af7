// Values come back as they were.
#include "lockstep/checkpoint/value_json.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/json_text.h"
#include "tests/support/error_text.h"

namespace lockstep::value_json_test {
namespace {

using namespace lockstep::detail;
using error_text::error_of;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

/// Through text, as in an index.
c10::IValue there_and_back(const c10::IValue& value) {
  return value_from(parsed_json<Json>(json_of(value, "x").dump(), "text"), "x");
}

TEST(Values, KeepNumbers) {
  for (const auto number : {INT64_MIN, INT64_MIN + 1, int64_t{-1}, int64_t{0}, int64_t{1} << 53, INT64_MAX}) {
    const auto back = there_and_back(number);
    ASSERT_TRUE(back.isInt());
    EXPECT_EQ(back.toInt(), number);
  }
  using Limits = std::numeric_limits<double>;
  for (const auto number : {0.0, 1.0, -2.0, 0.1, 1.0 / 3, 1e300, 1e22, Limits::min(), Limits::denorm_min(),
                            Limits::max(), Limits::lowest(), Limits::infinity(), -Limits::infinity()}) {
    const auto back = there_and_back(number);
    ASSERT_TRUE(back.isDouble()) << number;
    EXPECT_EQ(back.toDouble(), number);
  }
  EXPECT_TRUE(std::isnan(there_and_back(Limits::quiet_NaN()).toDouble()));
  const auto zero = there_and_back(-0.0).toDouble();
  EXPECT_EQ(zero, 0);
  EXPECT_TRUE(std::signbit(zero));
}

TEST(Values, KeepTextAndNothing) {
  EXPECT_TRUE(there_and_back({}).isNone());
  EXPECT_TRUE(there_and_back(true).isBool());
  EXPECT_TRUE(there_and_back(true).toBool());
  for (const auto* text : {"", "plain", "\"quoted\"\n\t\\", "ünïcode ✓", "nan"}) {
    EXPECT_EQ(there_and_back(std::string(text)).toStringRef(), text);
  }
  EXPECT_EQ(there_and_back(std::string("a\0b", 3)).toStringRef().size(), 3);
}

TEST(Values, KeepListsWithTheirTypes) {
  EXPECT_EQ(there_and_back(std::vector<int64_t>{1, INT64_MIN}).toIntVector(), (std::vector<int64_t>{1, INT64_MIN}));
  EXPECT_EQ(there_and_back(std::vector<double>{1, 2.5}).toDoubleVector(), (std::vector<double>{1, 2.5}));
  const auto special = there_and_back(std::vector<double>{1, std::numeric_limits<double>::infinity(), std::nan("")});
  ASSERT_TRUE(special.isDoubleList());
  EXPECT_EQ(special.toDoubleVector()[1], std::numeric_limits<double>::infinity());
  EXPECT_TRUE(there_and_back(c10::List<bool>({true, false})).isBoolList());
  EXPECT_EQ(there_and_back(c10::List<std::string>({"a", ""})).toListRef()[0].toStringRef(), "a");
  EXPECT_TRUE(there_and_back(std::vector<int64_t>{}).isList());
  c10::impl::GenericList mixed(c10::AnyType::get());
  mixed.push_back(1);
  mixed.push_back(2.5);
  mixed.push_back("three");
  mixed.push_back(c10::IValue());
  const auto list = there_and_back(mixed);
  const auto back = list.toListRef();
  ASSERT_EQ(back.size(), 4);
  EXPECT_TRUE(back[0].isInt());
  EXPECT_TRUE(back[1].isDouble());
  EXPECT_EQ(back[2].toStringRef(), "three");
  EXPECT_TRUE(back[3].isNone());
}

TEST(Values, KeepTuplesAndDictsInEachOther) {
  c10::impl::GenericDict inner(c10::StringType::get(), c10::AnyType::get());
  inner.insert("betas", c10::ivalue::Tuple::create({c10::IValue(0.9), c10::IValue(0.999)}));
  inner.insert("dict", 1);  // names that mean something here
  inner.insert("float", "nan");
  c10::impl::GenericDict outer(c10::StringType::get(), c10::AnyType::get());
  outer.insert("tuple", c10::ivalue::Tuple::create({c10::IValue(inner), c10::IValue(c10::ivalue::Tuple::create({}))}));
  outer.insert("", c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get()));
  const auto back = there_and_back(outer).toGenericDict();
  ASSERT_EQ(back.size(), 2);
  EXPECT_EQ(back.at("").toGenericDict().size(), 0);
  const auto tuple = back.at("tuple").toTuple()->elements();
  ASSERT_EQ(tuple.size(), 2);
  EXPECT_TRUE(tuple[1].toTupleRef().elements().empty());
  const auto dict = tuple[0].toGenericDict();
  EXPECT_EQ(dict.at("betas").toTupleRef().elements()[1].toDouble(), 0.999);
  EXPECT_EQ(dict.at("dict").toInt(), 1);
  EXPECT_EQ(dict.at("float").toStringRef(), "nan");
}

TEST(Values, RefuseWhatCannotBeHeld) {
  EXPECT_THAT(error_of([] { json_of(at::ones({1}), "x"); }), HasSubstr("'x' is a Tensor"));
  EXPECT_THAT(error_of([] { json_of(c10::complex<double>(1, 2), "x"); }), HasSubstr("'x' is a ComplexDouble"));
  c10::impl::GenericDict by_number(c10::IntType::get(), c10::AnyType::get());
  by_number.insert(1, 2);
  EXPECT_THAT(error_of([&] { json_of(by_number, "x"); }), HasSubstr("'x' is a dict by something else than names"));
  EXPECT_THAT(error_of([] { json_of(std::string("\xff\xfe"), "x"); }), HasSubstr("'x' is no UTF-8 text"));
  const auto nested = [](int depth) {
    c10::IValue value = 1;
    for (int i = 0; i < depth; ++i) {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      dict.insert("deeper", value);
      value = dict;
    }
    return value;
  };
  EXPECT_THAT(error_of([&] { json_of(nested(1000), "x"); }), HasSubstr("'x' is nested too deep"));
  EXPECT_EQ(error_of([&] { there_and_back(nested(90)); }), "");
}

TEST(Values, RefuseJsonThatTheyDoNotWrite) {
  for (const auto* text : {"{}", R"({"a":1})", R"({"dict":1})", R"({"tuple":{}})", R"({"float":"infinite"})",
                           R"({"float":1})", R"({"dict":{},"tuple":[]})", R"([{"dict":[]}])"}) {
    EXPECT_THAT(error_of([&] { value_from(Json::parse(text), "x"); }),
                HasSubstr("the value of 'x' has an unknown form"))
        << text;
  }
  EXPECT_THAT(error_of([] { value_from(Json::parse("[18446744073709551615]"), "x"); }),
              HasSubstr("the value of 'x' is too large a number"));
}

TEST(JsonText, IsParsedToALimit) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') + std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_EQ(error_of([&] { parsed_json<Json>(nested(kDeepestJson), "it"); }), "");
  EXPECT_THAT(error_of([&] { parsed_json<Json>(nested(kDeepestJson + 2), "it"); }), HasSubstr("it is nested too deep"));
  EXPECT_THAT(error_of([&] { parsed_json<nlohmann::json>(nested(1'000'000), "it"); }),
              HasSubstr("it is nested too deep"));
  EXPECT_THAT(error_of([] { parsed_json<Json>(R"([{"a":1},{"a":{"b":1,"b":2}}])", "it"); }),
              HasSubstr("it names 'b' twice"));
  EXPECT_EQ(error_of([] { parsed_json<Json>(R"([{"a":1},{"a":{"a":1},"b":{"a":2}}])", "it"); }), "");
  EXPECT_THAT(error_of([] { parsed_json<Json>("1e999", "it"); }), HasSubstr("it is no JSON"));
  EXPECT_TRUE(is_text("ü"));
  EXPECT_FALSE(is_text("\xc3"));
}

}  // namespace
}  // namespace lockstep::value_json_test
