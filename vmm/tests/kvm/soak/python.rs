//! CPython's own tests, from Debian's package.

use std::collections::BTreeSet;

use super::suite::{LOG, Outcome, Outcomes, RESULT, Suite};

/// The modules that use the kernel or the floating-point unit. The others test the language and its libraries, and the
/// whole suite would take half an hour.
const MODULES: [&str; 63] = [
    "test_asyncio",
    "test_array",
    "test_builtin",
    "test_cmath",
    "test_cmd_line",
    "test_ctypes",
    "test_dbm",
    "test_eintr",
    "test_epoll",
    "test_exceptions",
    "test_faulthandler",
    "test_fcntl",
    "test_file",
    "test_fileio",
    "test_float",
    "test_fork1",
    "test_gc",
    "test_glob",
    "test_hashlib",
    "test_int",
    "test_io",
    "test_ioctl",
    "test_largefile",
    "test_marshal",
    "test_math",
    "test_memoryview",
    "test_mmap",
    "test_multiprocessing_fork",
    "test_openpty",
    "test_os",
    "test_pathlib",
    "test_pipes",
    "test_poll",
    "test_popen",
    "test_posix",
    "test_posixpath",
    "test_pty",
    "test_pwd",
    "test_queue",
    "test_random",
    "test_resource",
    "test_sched",
    "test_select",
    "test_selectors",
    "test_shutil",
    "test_signal",
    "test_socket",
    "test_socketserver",
    "test_stat",
    "test_struct",
    "test_subprocess",
    "test_sys",
    "test_sys_setprofile",
    "test_tempfile",
    "test_thread",
    "test_threading",
    "test_threadsignals",
    "test_time",
    "test_timeout",
    "test_tracemalloc",
    "test_wait3",
    "test_wait4",
    "test_zlib",
];

pub(crate) fn soak_python_test_suite_as_on_the_host() {
    Suite {
        archive: "python/suite.tar",
        parts: &MODULES,
        run: |modules| script(&format!("-j2 {}", modules.join(" "))),
        repeat,
        parse,
        differences: include_str!("python.txt"),
        least: 5_000,
    }
    .compare();
}

/// The script that runs tests such as `test.test_os.OSTests.test_chdir` and `ctypes.test.test_find.…`, which are in the
/// modules `test_os` and `test_ctypes`.
fn repeat(tests: &[String]) -> String {
    let matching: Vec<String> = tests.iter().map(|test| format!("-m {test}")).collect();
    let module = |test: &String| match test.split('.').collect::<Vec<_>>()[..] {
        ["test", module, ..] => module.to_owned(),
        [package, ..] => format!("test_{package}"),
        [] => String::new(),
    };
    let modules: BTreeSet<String> = tests.iter().map(module).collect();
    let modules: Vec<String> = modules.into_iter().collect();
    script(&format!("-v {} {}", matching.join(" "), modules.join(" ")))
}

/// The vsock tests are left out: a guest without the kernel's vsock loopback cannot connect to its own CID, and tests
/// that try would wait forever. The tests run in a tmpfs, because on an overlay the inode numbers in directory listings
/// differ from those of stat.
fn script(selection: &str) -> String {
    format!(
        "mount -t tmpfs tmpfs /tmp; cd /tmp; rm -f {RESULT}; \
         timeout -s KILL 3000 python3 -m test --timeout 600 --junit-xml {RESULT} -i '*VSOCK*' {selection} >{LOG} 2>&1; \
         cd /; umount -l /tmp; touch {RESULT}"
    )
}

/// JUnit's XML as CPython's runner writes it, without an XML parser: `<testcase name="…" … />`, or with the elements
/// `failure`, `error` or `skipped` before `</testcase>`.
fn parse(xml: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    for case in xml.split("<testcase name=\"").skip(1) {
        let Some((name, rest)) = case.split_once('"') else {
            continue;
        };
        let end = rest.find("</testcase>").unwrap_or(rest.len());
        let body = &rest[..end];
        let outcome = if body.contains("<failure") || body.contains("<error") {
            Outcome::Failed
        } else if let Some((_, reason)) = body.split_once("<skipped>") {
            let reason = reason.split('<').next().unwrap_or_default();
            Outcome::Skipped(reason.to_owned())
        } else {
            Outcome::Passed
        };
        outcomes.insert(name.to_owned(), outcome);
    }
    outcomes
}
