// The axis "event": what happens between the two epochs of a program.
#include "lockstep/testing/combinations/trainer.h"

namespace lockstep::testing::combinations {

const std::vector<Event>& events() {
  static const std::vector<Event> all = {
      {"none", ""},
      {"load", "torch::load(net, \"as it was before the first step\");", [](Trainer& t) { t.load_first_model(); }},
      {"to", "net->to(at::kDouble); net->to(at::kFloat);", [](Trainer& t) { t.cast_there_and_back(); }},
      {"resume", "/* all of net, ddp and optimizer made anew; torch::load(net, …); torch::load(optimizer, …); */",
       [](Trainer& t) { t.save_and_resume(); }},
      {"freeze", "net->last->weight.requires_grad_(false); net->last->bias.requires_grad_(false);",
       [](Trainer& t) { t.set_last_trainable(false); }},
      {.name = "unfreeze",
       .text = "net->last->weight.requires_grad_(true); net->last->bias.requires_grad_(true);  // frozen at first",
       .run = [](Trainer& t) { t.set_last_trainable(true); },
       .begins_frozen = true},
      {.name = "unfreeze and wrap again",
       .text = "net->last->weight.requires_grad_(true); net->last->bias.requires_grad_(true); /* ddp made anew */",
       .run =
           [](Trainer& t) {
             t.set_last_trainable(true);
             t.wrap_again();
           },
       .begins_frozen = true},
      {.name = "add group",
       .text = "optimizer.add_param_group(net->last->parameters());  // which it did not have at first",
       .run = [](Trainer& t) { t.add_last_to_optimizer(); },
       .begins_without_last = true},
      {"wrap again", "/* ddp made anew, the optimizer stays */", [](Trainer& t) { t.wrap_again(); }},
  };
  return all;
}

}  // namespace lockstep::testing::combinations
