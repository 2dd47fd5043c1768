// Streams of the test device: queues, each with a thread of its own that dawdles at random.
//
// As on CUDA, launching returns at once, a wait for a point that nobody marked is none, and an error of a kernel
// shows at the next synchronisation.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace host_device {

using Clock = std::chrono::steady_clock;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;
constexpr int kNumStreams = 33;  // of a device: the default one, and a pool from which new ones are given in turn

// A place in a stream's order.
class Point {
 public:
  void pass() {
    std::lock_guard<std::mutex> lock(mutex_);
    time_ = Clock::now();
    is_passed_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_passed_; });
  }
  bool is_passed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_passed_;
  }
  Clock::time_point time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_passed_ = false;
  Clock::time_point time_;
};

using PointPtr = std::shared_ptr<Point>;

// How streams dawdle. Copies between host and device may be given a delay of their own.
struct Delays {
  std::mutex mutex;
  uint64_t seed = 0;
  double probability = 0;
  double longest_s = 0;
  double copy_s = 0;
  std::atomic<uint64_t> version{0};
  static Delays& get() {
    static auto* delays = new Delays;
    return *delays;
  }
};

// What happened, for tests to ask about. A listener is told at once, in the thread in which it happens.
class Counts {
 public:
  using Listener = std::function<void(const std::string&)>;
  static void add(const std::string& name) {
    std::shared_ptr<Listener> listener;
    {
      std::lock_guard<std::mutex> lock(mutex());
      all()[name]++;
      listener = heard_by();
    }
    if (listener) (*listener)(name);
  }
  static void tell(std::shared_ptr<Listener> listener) {
    std::lock_guard<std::mutex> lock(mutex());
    heard_by() = std::move(listener);
  }
  static std::map<std::string, int64_t> take() {
    std::lock_guard<std::mutex> lock(mutex());
    return std::exchange(all(), {});
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::shared_ptr<Listener>& heard_by() {
    static auto* listener = new std::shared_ptr<Listener>;
    return *listener;
  }
  static std::map<std::string, int64_t>& all() {
    static auto* counts = new std::map<std::string, int64_t>;
    return *counts;
  }
};

void enter_worker();  // what torch keeps per thread, for a thread that runs kernels

class Stream {
 public:
  void init(int device, int id) { number_ = device * kNumStreams + id; }

  void push(std::function<void()> task, bool is_copy = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_running_) {
      is_running_ = true;
      std::thread([this] { serve(); }).detach();
    }
    tasks_.push_back({std::move(task), is_copy});
    arrived_.notify_one();
  }

  PointPtr mark() {
    auto point = std::make_shared<Point>();
    push([point] { point->pass(); });
    return point;
  }

  void wait_for(PointPtr point) {
    push([point] { point->wait(); });
  }

  void synchronize() {
    if (has_work()) mark()->wait();
    raise();
  }

  bool has_work() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_busy_ || !tasks_.empty();
  }

  void settle() {  // waits, and forgets what went wrong
    if (has_work()) mark()->wait();
    std::lock_guard<std::mutex> lock(mutex_);
    error_.clear();
  }

  void raise() {  // as on CUDA, an error of a kernel is told by who comes next, again and again
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(error_.empty(), "a kernel on the test device has failed: ", error_);
  }

 private:
  struct Task {
    std::function<void()> run;
    bool is_copy;
  };

  void serve() {
    enter_worker();
    std::mt19937_64 chance;
    uint64_t version = ~0ull;
    while (true) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        is_busy_ = false;
        arrived_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        is_busy_ = true;
      }
      dawdle(chance, version, task.is_copy);
      try {
        task.run();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error_.empty()) error_ = error.what();
      }
    }
  }

  void dawdle(std::mt19937_64& chance, uint64_t& version, bool is_copy) {
    auto& delays = Delays::get();
    if (delays.version == 0) return;
    double seconds = 0;
    {
      std::lock_guard<std::mutex> lock(delays.mutex);
      if (version != delays.version) {
        version = delays.version;
        chance.seed(delays.seed * 1000003 + number_);
      }
      std::uniform_real_distribution<double> uniform(0, 1);
      if (uniform(chance) < delays.probability) seconds = uniform(chance) * delays.longest_s;
      if (is_copy) seconds += delays.copy_s;
    }
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }

  int number_ = 0;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Task> tasks_;
  std::string error_;
  bool is_running_ = false;
  bool is_busy_ = false;
};

// All streams, which live as long as the process, and what is current in this thread.
class Streams {
 public:
  static Stream& at(int device, int64_t id) {
    static auto* all = [] {
      auto* made = new std::array<std::array<Stream, kNumStreams>, kNumDevices>;
      for (int d = 0; d < kNumDevices; d++)
        for (int i = 0; i < kNumStreams; i++) (*made)[d][i].init(d, i);
      return made;
    }();
    TORCH_CHECK(device >= 0 && device < kNumDevices && id >= 0 && id < kNumStreams, "no stream ", id, " of device ",
                device);
    return (*all)[device][id];
  }
  static Stream& at(const c10::Stream& stream) { return at(stream.device_index(), stream.id()); }
  static Stream& current(int device) { return at(device, current_id(device)); }
  static int64_t& current_id(int device) {
    static thread_local std::array<int64_t, kNumDevices> ids{};
    return ids.at(device);
  }
  static int& device() {
    static thread_local int index = 0;
    return index;
  }
  static int64_t next_id(int device) {
    static std::array<std::atomic<int64_t>, kNumDevices> made{};
    return 1 + made.at(device)++ % (kNumStreams - 1);
  }
  static void settle() {
    for (int device = 0; device < kNumDevices; device++)
      for (int64_t id = 0; id < kNumStreams; id++) at(device, id).settle();
  }
  static void synchronize(int device) {
    for (int64_t id = 0; id < kNumStreams; id++) at(device, id).synchronize();
  }
};

// Makes a device current while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(Streams::device()) { Streams::device() = device; }
  ~OnDevice() { Streams::device() = before_; }

 private:
  int before_;
};

}  // namespace host_device
