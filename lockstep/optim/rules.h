// The update rules, all eight.
#pragma once

#include "lockstep/optim/adadelta.h"
#include "lockstep/optim/adagrad.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/adamax.h"
#include "lockstep/optim/rmsprop.h"
#include "lockstep/optim/rprop.h"
#include "lockstep/optim/sgd.h"
