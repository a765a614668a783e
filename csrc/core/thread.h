#pragma once

#include <pthread.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/status.h"

namespace herring {

/// A thread with a name (15 characters at most). Throws Error(kUnavailable) that says what to do where the system
/// gives none.
template <class Body>
std::thread start_thread(const char* name, Body&& body) {
  std::thread thread;
  try {
    thread = std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Error(Code::kUnavailable, std::string("cannot start the thread ") + name + ": " + error.code().message() +
                                        "; raise the limit of processes and threads (ulimit -u; in a container its "
                                        "limit of pids)");
  }
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace herring
