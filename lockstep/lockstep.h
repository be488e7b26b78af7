// Everything a training program needs. Library code and tests include the parts they use.
#pragma once

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/world.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/mesh/device_mesh.h"
