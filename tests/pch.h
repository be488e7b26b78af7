// Shared by all test programs that use libtorch: parsed once, not once per file.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
