//! The parts of seccomp filters. Which system calls a program may make stays with the program.

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

pub use seccompiler::{BpfProgram, Error, SeccompAction, sock_filter};

/// Rules by system call number. A rule without conditions matches any arguments.
pub type Rules = BTreeMap<i64, Vec<SeccompRule>>;
/// System calls that match with some arguments only: all conditions of one alternative must hold.
pub type CheckedCalls = Vec<(i64, Vec<Vec<Argument>>)>;

/// A condition for one argument of a system call.
#[derive(Clone, Debug)]
pub struct Argument {
    /// Counted from 0.
    index: u8,
    length: SeccompCmpArgLen,
    operator: SeccompCmpOp,
    value: u64,
}

/// The lower 32 bits of the argument equal `value`.
#[must_use]
pub fn equals(index: u8, value: u64) -> Argument {
    Argument {
        index,
        length: SeccompCmpArgLen::Dword,
        operator: SeccompCmpOp::Eq,
        value,
    }
}

/// The bits of the mask in the argument equal `value`.
#[must_use]
pub fn has(index: u8, mask: u64, value: u64) -> Argument {
    Argument {
        operator: SeccompCmpOp::MaskedEq(mask),
        ..equals(index, value)
    }
}

/// The argument is a null pointer.
#[must_use]
pub fn is_null(index: u8) -> Argument {
    Argument {
        length: SeccompCmpArgLen::Qword,
        ..equals(index, 0)
    }
}

/// A constant of the C library as the value of an argument.
#[must_use]
pub fn bits(constant: i32) -> u64 {
    constant.unsigned_abs().into()
}

/// Calls of every confined program: it makes no memory executable, and signals, as abort(3) does, only its own threads.
#[must_use]
pub fn own_memory_and_threads() -> CheckedCalls {
    let not_executable = vec![vec![has(2, bits(libc::PROT_EXEC), 0)]];
    vec![
        (libc::SYS_mmap, not_executable.clone()),
        (libc::SYS_mprotect, not_executable),
        (
            libc::SYS_tgkill,
            vec![vec![equals(0, std::process::id().into())]],
        ),
    ]
}

/// Rules for calls with any arguments.
pub fn any(calls: impl IntoIterator<Item = i64>) -> Rules {
    calls.into_iter().map(|call| (call, Vec::new())).collect()
}

/// Rules for calls whose arguments are checked.
///
/// # Errors
/// Returns an error for an argument that no system call has, and for a call without a condition.
pub fn checked(calls: CheckedCalls) -> Result<Rules, Error> {
    let rule = |conditions: Vec<Argument>| -> Result<SeccompRule, Error> {
        let conditions = conditions
            .into_iter()
            .map(|a| SeccompCondition::new(a.index, a.length, a.operator, a.value));
        Ok(SeccompRule::new(conditions.collect::<Result<_, _>>()?)?)
    };
    let rules = calls.into_iter().map(|(call, alternatives)| {
        let alternatives = alternatives.into_iter().map(rule);
        Ok((call, alternatives.collect::<Result<_, Error>>()?))
    });
    rules.collect()
}

/// Compiles a filter with an action for calls that match a rule, and one for all others.
///
/// # Errors
/// Returns an error if the filter is too long or both actions are the same.
pub fn compile(
    rules: Rules,
    matching: SeccompAction,
    others: SeccompAction,
) -> Result<BpfProgram, Error> {
    let filter = SeccompFilter::new(rules, others, matching, TargetArch::x86_64)?;
    Ok(BpfProgram::try_from(filter)?)
}
