// SPDX-License-Identifier: Apache-2.0
#include "tests/support/scoped_capture.hpp"

#include "tests/support/fault_driver.hpp"

#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>

#include <fmt/format.h>

#include <dlfcn.h>

namespace evmm::test {

struct scoped_capture::backend {
  backend() = default;
  backend(const backend&) = delete;
  backend& operator=(const backend&) = delete;
  virtual ~backend() = default;
  virtual void end() = 0;
  virtual void launch(native_stream stream) = 0;
};

struct scoped_capture::host_backend final : backend {
  host_backend(host_driver& driver, native_stream stream) : on(driver), origin(stream) {
    on.begin_capture(origin);
  }
  ~host_backend() override {
    try {
      if (!ended) end();
    } catch (const error&) {  // it was invalidated: that ends it too
    }
  }
  void end() override {
    ended = true;
    graph = on.end_capture(origin);
  }
  void launch(native_stream stream) override { on.launch_graph(graph, stream); }

  host_driver& on;
  native_stream origin;
  bool ended = false;
  std::shared_ptr<const host_graph> graph;
};

/// libcuda by name: tests need no CUDA header, and use the library that the driver has loaded.
struct scoped_capture::cuda_backend final : backend {
  explicit cuda_backend(native_stream stream) : origin(stream) {
    check("cuStreamGetCtx", origin, &context);  // refused once a capture is invalidated
    in_context([&] { check("cuStreamBeginCapture_v2", origin, 0); });
  }
  ~cuda_backend() override {
    try {
      if (!ended) end();
    } catch (const error&) {
    }
    in_context([&] {
      if (executable != nullptr) check("cuGraphExecDestroy", executable);
      if (graph != nullptr) check("cuGraphDestroy", graph);
    });
  }
  void end() override {
    ended = true;
    in_context([&] { check("cuStreamEndCapture", origin, &graph); });
  }
  void launch(native_stream stream) override {
    in_context([&] {
      if (executable == nullptr) {
        check("cuGraphInstantiateWithFlags", &executable, graph, 0ULL);
      }
      check("cuGraphLaunch", executable, stream);
    });
  }

  template <class... Arguments>
  void check(const char* name, Arguments... arguments) {
    using function = int (*)(Arguments...);
    const auto found = reinterpret_cast<function>(::dlsym(library, name));
    if (found == nullptr) throw unsupported(fmt::format("libcuda has no {}", name));
    if (const int result = found(arguments...); result != 0) {
      throw driver_error(fmt::format("{} returned {}", name, result), {}, result);
    }
  }
  template <class Step>
  void in_context(Step&& step) {
    void* popped = nullptr;
    check("cuCtxPushCurrent_v2", context);
    try {
      step();
    } catch (...) {
      check("cuCtxPopCurrent_v2", &popped);
      throw;
    }
    check("cuCtxPopCurrent_v2", &popped);
  }

  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  native_stream origin;
  void* context = nullptr;
  bool ended = false;
  void* graph = nullptr;
  void* executable = nullptr;
};

scoped_capture::scoped_capture(driver& on, native_stream stream) {
  auto* real = &on;
  while (auto* const around = dynamic_cast<fault_driver*>(real)) real = &around->inner();
  if (auto* const host = dynamic_cast<host_driver*>(real)) {
    backend_ = std::make_unique<host_backend>(*host, stream);
  } else {
    backend_ = std::make_unique<cuda_backend>(stream);
  }
}

scoped_capture::~scoped_capture() = default;

void scoped_capture::end() {
  backend_->end();
}

void scoped_capture::launch(native_stream stream) {
  backend_->launch(stream);
}

}  // namespace evmm::test
