//! The part of the seccomp filter that decides by system call number: a binary search over ranges of numbers with the
//! same policy, in classic BPF (Documentation/userspace-api/seccomp_filter.rst, `linux/filter.h`).

use std::collections::BTreeMap;

use jail::filter::{BpfProgram, sock_filter};
use nix::libc;

/// AUDIT_ARCH_X86_64 of `linux/audit.h`.
const ARCH: u32 = 0xc000_003e;
/// Offset of `nr` in `struct seccomp_data`; `arch` follows.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_NOT_LESS: u16 = 0x35;
const RETURN: u16 = 0x06;

/// The filter's action for a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallPolicy {
    /// The call is allowed.
    Allowed,
    /// The call fails with ENOSYS.
    Absent,
    /// The filter program that follows checks the arguments.
    Checked,
    /// The process is killed. This is the policy for every call that has no other policy.
    Fatal,
}

fn step(code: u16, k: u32, (jt, jf): (u8, u8)) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// A leaf of the search. The leaf of a checked call is a jump to the end of the search; its distance is filled in
/// later.
fn leaf(policy: CallPolicy) -> sock_filter {
    let answer = |k| step(RETURN, k, (0, 0));
    match policy {
        CallPolicy::Allowed => answer(libc::SECCOMP_RET_ALLOW),
        CallPolicy::Absent => answer(libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs()),
        CallPolicy::Checked => step(JUMP, 0, (0, 0)),
        CallPolicy::Fatal => answer(libc::SECCOMP_RET_KILL_PROCESS),
    }
}

/// The first number of each range, and its policy. The first range begins at 0, the last has no end.
fn ranges(policies: &BTreeMap<i64, CallPolicy>) -> Vec<(u32, CallPolicy)> {
    let mut ranges = vec![(0, CallPolicy::Fatal)];
    let mut next = 0;
    let mut begin = |at: u32, policy: CallPolicy| match ranges.last_mut() {
        Some((from, last)) if *from == at => *last = policy,
        Some((_, last)) if *last == policy => {}
        _ => ranges.push((at, policy)),
    };
    for (number, policy) in policies {
        let Ok(number) = u32::try_from(*number) else {
            continue;
        };
        if number > next {
            begin(next, CallPolicy::Fatal);
        }
        begin(number, *policy);
        next = number + 1;
    }
    begin(next, CallPolicy::Fatal);
    ranges
}

/// Builds the search over `ranges`, which must not be empty. Returns `None` if a jump would exceed 255 instructions.
fn halves(ranges: &[(u32, CallPolicy)]) -> Option<Vec<sock_filter>> {
    if let [(_, policy)] = ranges {
        return Some(vec![leaf(*policy)]);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (below, above) = (halves(low)?, halves(high)?);
    let over = u8::try_from(below.len()).ok()?;
    let mut all = vec![step(JUMP_NOT_LESS, high.first()?.0, (over, 0))];
    all.extend(below);
    all.extend(above);
    Some(all)
}

/// Puts the search before `program`, which then sees only checked calls. Returns `None` if a jump would exceed 255
/// instructions.
pub(super) fn before(
    program: BpfProgram,
    policies: &BTreeMap<i64, CallPolicy>,
) -> Option<BpfProgram> {
    let mut all = vec![
        step(LOAD, ARCH_AT, (0, 0)),
        step(JUMP_EQUAL, ARCH, (1, 0)),
        leaf(CallPolicy::Fatal),
        step(LOAD, NUMBER_AT, (0, 0)),
    ];
    all.extend(halves(&ranges(policies))?);
    let end = u32::try_from(all.len()).ok()?;
    for (at, step) in (1..).zip(&mut all) {
        if step.code == JUMP {
            step.k = end - at;
        }
    }
    all.extend(program);
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Return value that stands for the program that checks arguments.
    const CHECKED: u32 = 0x1234;

    /// Interprets a filter program like the kernel. Returns its return value.
    fn run(program: &[sock_filter], arch: u32, number: u32) -> u32 {
        let (mut at, mut a) = (0, 0);
        loop {
            let step = &program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { step.jt } else { step.jf });
            match step.code {
                LOAD => a = if step.k == ARCH_AT { arch } else { number },
                JUMP => at += usize::try_from(step.k).unwrap(),
                JUMP_EQUAL => at += jump(a == step.k),
                JUMP_NOT_LESS => at += jump(a >= step.k),
                RETURN => return step.k,
                other => panic!("{other:#x}"),
            }
        }
    }

    fn any_policy() -> impl Strategy<Value = CallPolicy> {
        prop_oneof![
            Just(CallPolicy::Allowed),
            Just(CallPolicy::Absent),
            Just(CallPolicy::Checked)
        ]
    }

    proptest! {
        #[test]
        fn every_number_gets_its_policy(
            policies in proptest::collection::btree_map(0..470_i64, any_policy(), 0..90),
        ) {
            let checked = vec![step(RETURN, CHECKED, (0, 0))];
            let program = before(checked, &policies).expect("short jumps");
            for number in (0..600).chain([1 << 30, (1 << 30) + 1, u32::MAX]) {
                let policy = policies.get(&i64::from(number)).copied();
                let expected = match policy.unwrap_or(CallPolicy::Fatal) {
                    CallPolicy::Checked => CHECKED,
                    other => leaf(other).k,
                };
                prop_assert_eq!(run(&program, ARCH, number), expected, "{}", number);
            }
            // 32-bit calls have other numbers and are always fatal.
            prop_assert_eq!(run(&program, 0x4000_0003, 0), libc::SECCOMP_RET_KILL_PROCESS);
        }
    }
}
