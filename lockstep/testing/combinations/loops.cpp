// The axis "loop": what stands between zero_grad() and step().
#include <ATen/TensorOperators.h>

#include "lockstep/testing/combinations/trainer.h"

namespace lockstep::testing::combinations {

const std::vector<Loop>& loops() {
  static const std::vector<Loop> all = {
      {"simple", "loss(ddp(a)).backward();", [](Trainer& t) { t.backward(t.loss()); }},
      {"accumulate", "{ auto guard = ddp.no_sync(); (loss(ddp(a)) / 2).backward(); }\n(loss(ddp(b)) / 2).backward();",
       [](Trainer& t) {
         t.without_sync([&] { t.backward(t.loss(0) / 2); });
         t.backward(t.loss(1) / 2);
       }},
      {"accumulate synced", "(loss(ddp(a)) / 2).backward();\n(loss(ddp(b)) / 2).backward();",
       [](Trainer& t) {
         t.backward(t.loss(0) / 2);
         t.backward(t.loss(1) / 2);
       }},
      {"several forwards", "auto first = loss(ddp(a));\n((first + loss(ddp(b))) / 2).backward();",
       [](Trainer& t) {
         const auto first = t.loss(0);
         t.backward((first + t.loss(1)) / 2);
       }},
      {"forward for the log", "loss(ddp(a)).backward();\nlog(loss(ddp(b)));",
       [](Trainer& t) {
         t.backward(t.loss(0));
         t.loss(1);
       }},
      {"evaluation between", "loss(ddp(a)).backward();\n{ NoGradGuard guard; net->eval(); ddp(b); net->train(); }",
       [](Trainer& t) {
         t.backward(t.loss());
         t.evaluate();
       }},
      {"weight penalty", "loss(ddp(a)).backward();\n(0.1 * sum_of_squares(net->parameters())).backward();",
       [](Trainer& t) {
         t.backward(t.loss());
         t.penalize_weights();
       },
       [](Trainer& t) { t.penalize_weights(); }},
      {"weighted", "ddp.backward(loss(ddp(a)), rank + 1);", [](Trainer& t) { t.weighted_backward(t.loss()); }},
      {"gradient penalty",
       "auto value = loss(ddp(a.requires_grad_()));\nauto slope = grad({value}, {a}, {}, true, "
       "/*create_graph=*/true)[0];\n"
       "(value + 0.02 * slope.pow(2).sum()).backward();",
       [](Trainer& t) { t.backward(t.loss_with_input_penalty()); }},
      {"module throws",
       "try { ddp(a); /* throws in steps 0 and 4 */ } catch (…) { optimizer.zero_grad(); }\nloss(ddp(a)).backward();",
       [](Trainer& t) { t.backward_with(Fault::kInForward); }},
      {"loss throws",
       "try { loss(ddp(a)); /* throws in steps 0 and 4 */ } catch (…) { optimizer.zero_grad(); "
       "}\nloss(ddp(a)).backward();",
       [](Trainer& t) { t.backward_with(Fault::kInLoss); }},
      {"backward throws",
       "try { loss(ddp(a)).backward(); /* throws in steps 0 and 4 */ } catch (…) { optimizer.zero_grad(); "
       "}\nloss(ddp(a)).backward();",
       [](Trainer& t) { t.backward_with(Fault::kInBackward); }},
      {"skipped step", "loss(ddp(a)).backward();\nif (step == 0 || step == 4) continue;  // as after an overflow",
       [](Trainer& t) {
         t.backward(t.loss());
         t.leave_step_out_if_special();
       }},
      {"no_sync after synced",
       "auto first = loss(ddp(a));\nauto second = [&] { auto guard = ddp.no_sync(); return loss(ddp(b)); }();\n"
       "((first + second) / 2).backward();",
       [](Trainer& t) {
         const auto first = t.loss(0);
         at::Tensor second;
         t.without_sync([&] { second = t.loss(1); });
         t.backward((first + second) / 2);
       }},
  };
  return all;
}

}  // namespace lockstep::testing::combinations
