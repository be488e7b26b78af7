// Everything a training program needs. Library code and tests include the parts they use.
#pragma once

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/world.h"
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/hook_registry.h"
#include "lockstep/ddp/optimizer_overlap_hook.h"
#include "lockstep/ddp/post_local_sgd.h"
#include "lockstep/ddp/power_sgd.h"
#include "lockstep/ddp/quantization_hooks.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/optim/functional_registry.h"
#include "lockstep/optim/optimizers.h"
