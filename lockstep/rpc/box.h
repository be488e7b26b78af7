// What an owner keeps behind an RRef: any C++ object, in an IValue.
//
// Libtorch's holder of Python objects is the one kind of IValue that may hold anything and still tells which tensors
// are inside, which futures on an accelerator ask for.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <map>
#include <memory>
#include <string>
#include <typeinfo>

#include "lockstep/rpc/wire.h"

namespace lockstep::rpc {

/// The value of a function that returns none.
struct None {};
inline std::tuple<> rpc_fields(None& /*none*/) {
  return {};
}

namespace detail {

/// Boxes there are, by what is in them. For the list of what a shutdown leaves behind.
void count_box(const std::type_info& type, int by);
std::map<std::string, int> living_boxes();

class AnyBox : public c10::ivalue::PyObjectHolder {
 public:
  virtual const std::type_info& type() const = 0;
  /// Throws if the object does not travel.
  virtual c10::IValue wire() const = 0;
  /// Null if the object is none.
  virtual torch::nn::Module* module() const = 0;

  PyObject* getPyObject() final;
  c10::InferredType tryToInferType() final;
  c10::IValue toIValue(const c10::TypePtr& type, std::optional<std::int32_t> count) final;
  std::string toStr() final;
};

/// The tensors in what travels.
std::vector<at::Tensor> tensors_of(const c10::IValue& wire);

std::string readable(const std::type_info& type);

/// "RRef to X holds a Y".
[[noreturn]] void refuse_other_type(const std::type_info& held, const std::type_info& wanted);
[[noreturn]] void refuse_to_travel(const std::type_info& type);

/// A module as it travels: what it was made of, then its tensors by name. None if it was not made by remote().
c10::IValue wire_of_module(const torch::nn::Module& module, const c10::IValue& recipe);
/// The box of a copy, made by the registered class.
c10::IValue module_from_wire(const c10::IValue& wire, const std::string& class_name);

template <class T>
class Box final : public AnyBox {
 public:
  Box(std::shared_ptr<T> value, c10::IValue recipe) : value_(std::move(value)), recipe_(std::move(recipe)) {
    count_box(typeid(T), 1);
  }
  ~Box() override { count_box(typeid(T), -1); }
  Box(const Box&) = delete;
  Box& operator=(const Box&) = delete;

  const std::shared_ptr<T>& value() const { return value_; }
  const std::type_info& type() const override { return typeid(T); }
  c10::IValue wire() const override {
    if constexpr (Wired<T>) {
      return Wire<T>::to(*value_);
    } else if constexpr (std::derived_from<T, torch::nn::Module>) {
      return wire_of_module(*value_, recipe_);
    } else {
      refuse_to_travel(typeid(T));
    }
  }
  torch::nn::Module* module() const override {
    if constexpr (std::derived_from<T, torch::nn::Module>) return value_.get();
    return nullptr;
  }
  std::vector<at::Tensor> extractTensors() override {
    if constexpr (Wired<T>) {
      return tensors_of(wire());
    } else if constexpr (std::derived_from<T, torch::nn::Module>) {
      auto tensors = value_->parameters();
      for (const auto& buffer : value_->buffers()) tensors.push_back(buffer);
      return tensors;
    } else {
      return {};
    }
  }

 private:
  std::shared_ptr<T> value_;
  c10::IValue recipe_;
};

/// What RRefs hold for a function that returns R: a pointer's or module holder's object, else the value.
template <class R>
struct Held {
  using Type = R;
  static std::shared_ptr<R> pointer(R value) { return std::make_shared<R>(std::move(value)); }
};
template <>
struct Held<void> {
  using Type = None;
};
template <class T>
struct Held<std::shared_ptr<T>> {
  using Type = T;
  static std::shared_ptr<T> pointer(std::shared_ptr<T> value) { return value; }
};
template <class T>
  requires std::derived_from<T, torch::nn::ModuleHolder<typename T::ContainedType>>
struct Held<T> {
  using Type = typename T::ContainedType;
  static std::shared_ptr<Type> pointer(const T& value) { return value.ptr(); }
};

template <class T>
c10::IValue boxed(std::shared_ptr<T> value, c10::IValue recipe = {}) {
  return c10::IValue(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
      c10::make_intrusive<Box<T>>(std::move(value), std::move(recipe))));
}

/// The object inside of `value`, if it is one of ours.
const AnyBox& any_box(const c10::IValue& value);

template <class T>
const std::shared_ptr<T>& unboxed(const c10::IValue& value) {
  const auto* box = dynamic_cast<const Box<T>*>(&any_box(value));
  if (box == nullptr) refuse_other_type(any_box(value).type(), typeid(T));
  return box->value();
}

}  // namespace detail
}  // namespace lockstep::rpc
