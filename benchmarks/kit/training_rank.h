// What one rank of a training benchmark does: contenders take turns, and rank 0 prints what they took. training_peer.py
// does the same in Python.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::bench {

/// A part of a training step whose time is taken.
struct TimedWork {
  std::string what;  // one word
  std::function<void()> run;
  std::function<void()> prepare = nullptr;   // before ranks meet and the clock starts
  std::function<double()> figure = nullptr;  // what is taken in place of the time
};

/// One way to train. Everything in it is collective.
struct Contender {
  std::string name;
  std::vector<TimedWork> timed;
  std::function<std::map<std::string, double>()> bytes = nullptr;  // this rank's, by what was counted; after training
};

/// By how many bytes this process's resident memory grows at most while `work` runs. Local.
double peak_growth_of(const std::function<void()>& work);

struct Case {
  std::string model;
  int64_t width = 32;
};

using MakeContender = std::function<Contender(const std::string& name, const Case& which, const World& world)>;

struct RankPlan {
  Case which = {};
  std::vector<std::string> contenders = {};
  double seconds = 1;  // for all of them together; 0: one turn, after those that warm up
};

/// Prints lines "WHAT CONTENDER VALUE": milliseconds of each timed work; and if there is only one contender its
/// `bytes`, and as "peak" by how many bytes the process's resident memory grew at most while it was made and trained.
/// Each is that of the rank with the highest.
void run_rank(const RankPlan& plan, const MakeContender& make);

}  // namespace lockstep::bench
