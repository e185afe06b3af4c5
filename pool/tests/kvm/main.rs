//! The pool with the real `cube-vmm` and the prepared template. Each test has a state directory of its own; what
//! a killed run has left is swept at the next start.

mod support;

mod lifecycle;
mod limits;

use libtest_mimic::{Arguments, Trial};

type Test = fn();

fn main() {
    if let Some(state) = std::env::var_os(support::SERVER) {
        return match std::env::var_os(support::BUSY) {
            Some(_) => limits::be_busy(state.as_ref()),
            None => lifecycle::be_server(state.as_ref()),
        };
    }
    let arguments = Arguments::from_args();
    let lack = support::lack();
    if let Some(lack) = &lack {
        eprintln!("the tests of the pool are skipped: {lack}");
    }
    let trials = lifecycle::TESTS
        .iter()
        .chain(&limits::TESTS)
        .map(|(name, test): &(&str, Test)| {
            let test = *test;
            Trial::test(*name, move || {
                test();
                Ok(())
            })
            .with_ignored_flag(lack.is_some())
        })
        .collect();
    support::sweep();
    libtest_mimic::run(&arguments, trials).exit();
}
