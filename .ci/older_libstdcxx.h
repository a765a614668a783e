// What `make wheels` compiles every file with, so that a wheel built with gcc 12 also runs beside the libstdc++ of gcc
// 11 (RHEL 9, Amazon Linux 2023). gcc 12 gave condition_variable::wait a second version, which differs only for threads
// that pthread_cancel ends; Herring cancels none. Without this line the wheel asks for the newer version.
#pragma once
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
