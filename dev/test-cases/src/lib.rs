//! Test programs that list their cases themselves. A case that lacks something on this host is counted as ignored, and
//! its reason is printed; so are cases that take much time, whose names begin with `soak_`, until they are asked for.
//!
//! The program has `harness = false` in its manifest and is called as any test program is.

use libtest_mimic::{Arguments, Failed, Trial};

pub use libtest_mimic::Conclusion;

/// One test: its name begins with its tier.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// As it is listed and chosen.
    pub name: &'static str,
    /// Fails by panicking.
    pub run: fn(),
}

/// Lists test functions by their own names: `cases! { module::{one, another}, … }`.
#[macro_export]
macro_rules! cases {
    ($($module:ident :: {$($name:ident),* $(,)?}),* $(,)?) => {
        [$($($crate::Case { name: stringify!($name), run: $module::$name }),*),*]
    };
}

/// Runs what the command line asks for. `lack` says what a case of that name lacks on this host, `None` if it can run.
pub fn run(
    cases: impl IntoIterator<Item = Case>,
    lack: fn(&'static str) -> Option<String>,
) -> Conclusion {
    let mut arguments = Arguments::from_args();
    // VMs share few cores and measured time: one test after another unless asked otherwise.
    arguments.test_threads.get_or_insert(1);
    let trials = cases.into_iter().map(|case| trial(case, lack)).collect();
    libtest_mimic::run(&arguments, trials)
}

fn trial(case: Case, lack: fn(&'static str) -> Option<String>) -> Trial {
    let lacks = lack(case.name);
    if let Some(lacks) = &lacks {
        eprintln!("{} is skipped: {lacks}", case.name);
    }
    let soak = case.name.starts_with("soak_");
    Trial::test(case.name, move || {
        // Asked for with --ignored on a host that lacks something.
        match lack(case.name) {
            Some(lacks) => Err(Failed::from(format!("cannot run here: {lacks}"))),
            None => {
                (case.run)();
                Ok(())
            }
        }
    })
    .with_ignored_flag(soak || lacks.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    mod lives {
        pub(super) fn kvm_one() {}
        pub(super) fn soak_two() {}
    }

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn everything(_: &str) -> Option<String> {
        Some("there is no machine".to_owned())
    }

    #[test]
    fn cases_have_the_names_of_their_functions() {
        let names = cases! { lives::{kvm_one, soak_two} }.map(|case| case.name);
        assert_eq!(names, ["kvm_one", "soak_two"]);
    }

    #[test]
    fn what_lacks_something_or_much_time_is_ignored() {
        let ignored = |lack| {
            cases! { lives::{kvm_one, soak_two} }.map(|case| trial(case, lack).has_ignored_flag())
        };
        assert_eq!(ignored(nothing), [false, true]);
        assert_eq!(ignored(everything), [true, true]);
    }
}
