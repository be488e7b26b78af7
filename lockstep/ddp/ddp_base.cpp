#include "lockstep/ddp/ddp_base.h"

#include <string_view>

#include "lockstep/ddp/engine.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep {

NoSyncGuard::NoSyncGuard(DdpEngine& engine, bool is_local) : engine_(engine), was_enabled_(engine.is_sync_enabled()) {
  if (is_local) engine_.set_sync_enabled(false);
}

NoSyncGuard::~NoSyncGuard() {
  engine_.set_sync_enabled(was_enabled_);
}

std::string strip_ddp_prefix(const std::string& name) {
  constexpr std::string_view kPrefix = "module.";
  return name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
}

DdpBase::DdpBase(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options)
    : engine_(DdpEngine::make(std::move(module), options)) {
  engine_->set_joinable(this);
}

DdpBase::~DdpBase() = default;

DdpOptions DdpBase::with_group(DdpOptions options, const GroupPtr& group) {
  TORCH_CHECK(group, "[lockstep/ddp] the process group is null: this rank is not in it");
  TORCH_CHECK(!options.process_group || *options.process_group == group,
              "[lockstep/ddp] two process groups were given");
  options.process_group = group;
  return options;
}

// ---- a forward ----

// A forward that backward runs again is no step: it only computes.
void DdpBase::begin_forward() {
  if (detail::is_recomputing()) return;
  engine_->pre_forward();
}

void DdpBase::end_forward(const std::vector<at::Tensor*>& outputs) {
  if (detail::is_recomputing()) return;
  engine_->post_forward(outputs);
}

void DdpBase::enter_module() {
  engine_->enter_module();
}

void DdpBase::leave_module() noexcept {
  engine_->leave_module();
}

bool DdpBase::casts_or_moves_inputs() const {
  return engine_->changes_inputs();
}

at::Tensor DdpBase::cast_and_move(const at::Tensor& input) const {
  return engine_->prepare_input(input);
}

void DdpBase::backward(const at::Tensor& loss, double weight) {
  engine_->backward(loss, weight);
}

NoSyncGuard DdpBase::no_sync(bool is_local) {
  return NoSyncGuard(*engine_, is_local);
}

// ---- Join ----

Join DdpBase::join(bool divide_by_initial_world_size, bool enable, bool throw_on_early_termination) {
  return Join({this}, {.enable = enable,
                       .throw_on_early_termination = throw_on_early_termination,
                       .options = {.divide_by_initial_world_size = divide_by_initial_world_size}});
}

Join DdpBase::join(JoinSettings settings) {
  return Join({this}, std::move(settings));
}

void DdpBase::check_join(const JoinSettings& settings) const {
  engine_->check_join(settings);
}

std::unique_ptr<JoinHook> DdpBase::join_hook(const JoinOptions& options) {
  return engine_->join_hook(options);
}

c10::Device DdpBase::join_device() const {
  return engine_->device();
}

GroupPtr DdpBase::join_process_group() const {
  return engine_->group();
}

std::string DdpBase::join_name() const {
  return "DistributedDataParallel";
}

JoinPhase DdpBase::join_phase() const {
  return JoinPhase::kGradients;
}

JoinProgress DdpBase::join_progress() const {
  return engine_->join_progress();
}

// ---- settings ----

void DdpBase::register_comm_hook(CommHook hook) {
  engine_->register_comm_hook(std::move(hook));
}

void DdpBase::register_parameter_hook(ParameterHook hook) {
  engine_->register_parameter_hook(std::move(hook));
}

void DdpBase::register_fused_optim(const OptimizerFactory& optim, const std::vector<at::Tensor>& optim_params) {
  engine_->register_fused_optim(optim, optim_params);
}

void DdpBase::register_buffer_comm_hook(BufferHook hook, BufferHookLocation location) {
  engine_->register_buffer_comm_hook(std::move(hook), location);
}

void DdpBase::set_static_graph() {
  engine_->set_static_graph();
}

void DdpBase::use_plan(const BucketPlan& plan) {
  engine_->use_plan(plan);
}

void DdpBase::set_ddp_sink_clone(bool clones) {
  engine_->set_sink_clones(clones);
}

void DdpBase::set_sparse_metadata(std::map<std::string, at::Tensor> rows) {
  engine_->reducer_for("set_sparse_metadata").set_sparse_metadata(std::move(rows));
}

void DdpBase::update_process_group(const GroupPtr& group) {
  engine_->update_process_group(group);
}

Recovered DdpBase::recover(const GroupPtr& group) {
  return engine_->recover(group);
}

void DdpBase::check_finalized() {
  engine_->reducer_for("check_finalized").check_finalized();
}

// ---- for those who ask ----

DdpSnapshot DdpBase::snapshot() const {
  return engine_->snapshot();
}

void DdpBase::restore(const DdpSnapshot& snapshot) {
  engine_->restore(snapshot);
}

const BucketPlan& DdpBase::bucket_plan() const {
  return engine_->reducer_for("bucket_plan").plan();
}

int64_t DdpBase::buckets_reduced() const {
  return engine_->reducer_for("buckets_reduced").last_step().buckets_reduced;
}

std::optional<double> DdpBase::overlap_share() const {
  return engine_->overlap_share();
}

c10::DDPLoggingData DdpBase::get_ddp_logging_data() const {
  return engine_->logging_data();
}

void DdpBase::set_ddp_runtime_logging_sample_rate(int sample_rate) {
  engine_->set_runtime_logging_sample_rate(sample_rate);
}

const GroupPtr& DdpBase::process_group() const {
  return engine_->group();
}

const DdpOptions& DdpBase::options() const {
  return engine_->options();
}

void DdpBase::check_clone() const {
  TORCH_CHECK(options().delay_all_reduce_named_params.empty(),
              "[lockstep/ddp] a wrapper with delayed parameters cannot be cloned: it names tensors of its module");
}

}  // namespace lockstep
