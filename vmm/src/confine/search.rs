//! The part of the system call filter that goes by numbers: a search by halves over the ranges of numbers that have
//! the same verdict, in classic BPF (Documentation/userspace-api/seccomp_filter.rst, `linux/filter.h`).

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{BpfProgram, sock_filter};

/// AUDIT_ARCH_X86_64 of `linux/audit.h`.
const ARCH: u32 = 0xc000_003e;
/// Offsets in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_NOT_LESS: u16 = 0x35;
const RETURN: u16 = 0x06;

/// What becomes of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is made.
    Allowed,
    /// It fails with ENOSYS.
    Absent,
    /// Its arguments decide.
    Judged,
    /// The process ends. So it is for any call that is in no list.
    Fatal,
}

fn step(code: u16, k: u32, (jt, jf): (u8, u8)) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// A leaf of the search. That of a judged call jumps to the end, wherever that will be.
fn leaf(verdict: Verdict) -> sock_filter {
    let answer = |k| step(RETURN, k, (0, 0));
    match verdict {
        Verdict::Allowed => answer(libc::SECCOMP_RET_ALLOW),
        Verdict::Absent => answer(libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs()),
        Verdict::Judged => step(JUMP, 0, (0, 0)),
        Verdict::Fatal => answer(libc::SECCOMP_RET_KILL_PROCESS),
    }
}

/// The first number of each range, and its verdict; the first range begins at 0, the last has no end.
fn ranges(verdicts: &BTreeMap<i64, Verdict>) -> Vec<(u32, Verdict)> {
    let mut ranges = vec![(0, Verdict::Fatal)];
    let mut next = 0;
    let mut begin = |at: u32, verdict: Verdict| match ranges.last_mut() {
        Some((from, last)) if *from == at => *last = verdict,
        Some((_, last)) if *last == verdict => {}
        _ => ranges.push((at, verdict)),
    };
    for (number, verdict) in verdicts {
        let Ok(number) = u32::try_from(*number) else {
            continue;
        };
        if number > next {
            begin(next, Verdict::Fatal);
        }
        begin(number, *verdict);
        next = number + 1;
    }
    begin(next, Verdict::Fatal);
    ranges
}

/// The search over some ranges; `None` if a jump would be too long.
fn halves(ranges: &[(u32, Verdict)]) -> Option<Vec<sock_filter>> {
    if let [(_, verdict)] = ranges {
        return Some(vec![leaf(*verdict)]);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (below, above) = (halves(low)?, halves(high)?);
    let over = u8::try_from(below.len()).ok()?;
    let mut all = vec![step(JUMP_NOT_LESS, high.first()?.0, (over, 0))];
    all.extend(below);
    all.extend(above);
    Some(all)
}

/// The program, with the search before it: it sees only the calls that are judged. `None` if a jump would be too long.
pub(super) fn before(program: BpfProgram, verdicts: &BTreeMap<i64, Verdict>) -> Option<BpfProgram> {
    let mut all = vec![
        step(LOAD, ARCH_AT, (0, 0)),
        step(JUMP_EQUAL, ARCH, (1, 0)),
        leaf(Verdict::Fatal),
        step(LOAD, NUMBER_AT, (0, 0)),
    ];
    all.extend(halves(&ranges(verdicts))?);
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

    /// Stands for the program by arguments.
    const JUDGED: u32 = 0x1234;

    /// Runs a program as the kernel would; the answer.
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

    fn any_verdict() -> impl Strategy<Value = Verdict> {
        prop_oneof![
            Just(Verdict::Allowed),
            Just(Verdict::Absent),
            Just(Verdict::Judged)
        ]
    }

    proptest! {
        #[test]
        fn every_number_gets_its_verdict(
            verdicts in proptest::collection::btree_map(0..470_i64, any_verdict(), 0..90),
        ) {
            let judged = vec![step(RETURN, JUDGED, (0, 0))];
            let program = before(judged, &verdicts).expect("short jumps");
            for number in (0..600).chain([1 << 30, (1 << 30) + 1, u32::MAX]) {
                let verdict = verdicts.get(&i64::from(number)).copied();
                let expected = match verdict.unwrap_or(Verdict::Fatal) {
                    Verdict::Judged => JUDGED,
                    other => leaf(other).k,
                };
                prop_assert_eq!(run(&program, ARCH, number), expected, "{}", number);
            }
            // 32-bit calls have other numbers.
            prop_assert_eq!(run(&program, 0x4000_0003, 0), libc::SECCOMP_RET_KILL_PROCESS);
        }
    }
}
