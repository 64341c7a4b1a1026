// SPDX-License-Identifier: Apache-2.0
// Two libraries of PyTorch's names with the few symbols from which lib/torch makes a
// torch.OutOfMemoryError: libc10.so has c10::Error, libc10_cuda.so c10::OutOfMemoryError.
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#define FAKE_API __attribute__((visibility("default")))

namespace c10 {

struct FAKE_API SourceLocation {
  const char* function;
  const char* file;
  std::uint32_t line;
};

class FAKE_API Error : public std::exception {
 public:
  Error(SourceLocation where, std::string message);
  const char* what() const noexcept override;

 private:
  std::string message_;
  std::uint32_t line_;
};

#ifdef FAKE_C10_CUDA

class FAKE_API OutOfMemoryError : public Error {
  using Error::Error;
};

// Makes this library have the class's tables.
extern "C" FAKE_API void fake_c10_cuda_throw() {
  throw OutOfMemoryError({"function", "file", 1}, "thrown by fake_c10_cuda_throw");
}

#else

Error::Error(SourceLocation where, std::string message)
    : message_(std::move(message)), line_(where.line) {}

const char* Error::what() const noexcept {
  return line_ == 0 ? "the location did not arrive" : message_.c_str();
}

#endif

}  // namespace c10
