//! Large kernel interfaces that a VMM does not need. They contain many of the kernel's vulnerabilities.

use nix::libc;

use super::attempt::{Attempt, Class, FILTER, USUAL, no_change};

pub(super) const ATTEMPTS: &[Attempt] = &[
    Attempt {
        name: "kernel-io-uring",
        class: Class::Kernel,
        why: "Operations of io_uring do not pass the seccomp filter.",
        refusals: FILTER,
        act: |i, _| {
            let parameters = i.put(&[0; 120])?;
            i.attempt("io_uring_setup", libc::SYS_io_uring_setup, &[4, parameters])
        },
        look: no_change,
    },
    Attempt {
        name: "kernel-bpf",
        class: Class::Kernel,
        why: "BPF programs run in the kernel, among them those that enforce network policies.",
        refusals: USUAL,
        act: |i, _| {
            // BPF_MAP_CREATE of an array of four 8-byte values with 4-byte keys.
            let words = [4 << 32 | 2, 4 << 32 | 8, 0, 0, 0, 0, 0, 0, 0];
            let attributes = i.put_words(&words)?;
            i.attempt("bpf", libc::SYS_bpf, &[0, attributes, 72])
        },
        look: no_change,
    },
    Attempt {
        name: "kernel-perf",
        class: Class::Kernel,
        why: "Performance counters reveal what other programs do.",
        refusals: USUAL,
        act: |i, _| {
            // PERF_TYPE_SOFTWARE, PERF_ATTR_SIZE_VER0, PERF_COUNT_SW_CPU_CLOCK. Counts all processes on CPU 0.
            let attributes = i.put_words(&[64 << 32 | 1, 0, 0, 0, 0, 0, 0, 0])?;
            let arguments = [attributes, -1, 0, -1, 0];
            i.attempt("perf_event_open", libc::SYS_perf_event_open, &arguments)
        },
        look: no_change,
    },
    Attempt {
        name: "kernel-userfaultfd",
        class: Class::Kernel,
        why: "It can stop the kernel in the middle of a copy, which makes race conditions easy to exploit.",
        refusals: USUAL,
        act: |i, _| {
            i.attempt(
                "userfaultfd",
                libc::SYS_userfaultfd,
                &[libc::O_CLOEXEC.into()],
            )
        },
        look: no_change,
    },
    Attempt {
        name: "kernel-log",
        class: Class::Kernel,
        why: "The kernel log contains kernel addresses.",
        refusals: USUAL,
        act: |i, _| {
            // SYSLOG_ACTION_READ_ALL of syslog(2).
            let room = i.room(256)?;
            i.attempt("syslog", libc::SYS_syslog, &[3, room, 256])
        },
        look: no_change,
    },
    Attempt {
        name: "kernel-key",
        class: Class::Kernel,
        why: "Keyrings take kernel memory and outlive the process.",
        refusals: FILTER,
        act: |i, _| {
            let kind = i.put(b"user\0")?;
            let name = i.put(b"cube-confinement\0")?;
            // -2 is KEY_SPEC_PROCESS_KEYRING.
            i.attempt("add_key", libc::SYS_add_key, &[kind, name, name, 4, -2])
        },
        look: no_change,
    },
];
