//! A harness for test programs whose cases need something that a host may lack. A case that cannot run on this host is
//! counted as ignored, and the reason is printed. Cases whose names begin with `soak_` are ignored as well unless
//! `--ignored` or `--include-ignored` is given.
//!
//! The test program has `harness = false` in its manifest and accepts libtest's arguments.

use std::{
    env,
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

use libtest_mimic::{Arguments, Failed, Trial};

pub use libtest_mimic::Conclusion;

/// A test. The prefix of its name is its tier.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    /// The test function. The case fails if it panics.
    pub run: fn(),
}

/// Makes an array of [`Case`]s named after their functions: `cases! { module::{one, another}, … }`.
#[macro_export]
macro_rules! cases {
    ($($module:ident :: {$($name:ident),* $(,)?}),* $(,)?) => {
        [$($($crate::Case { name: stringify!($name), run: $module::$name }),*),*]
    };
}

/// Beginning of a line of output for the table of `cargo xtask soak`.
pub const FOUND: &str = "found: ";

/// Prints a result of this test for the table of `cargo xtask soak`. The arguments are those of `println!`.
#[macro_export]
macro_rules! found {
    ($($arguments:tt)*) => {
        eprintln!("{}{}", $crate::FOUND, format_args!($($arguments)*))
    };
}

/// The first requirement of tests with VMs that this host does not meet, if any. `built`: files that `cargo xtask test`
/// makes, each below the directory that an environment variable names.
#[must_use]
pub fn lack_for_vms(built: &[(&str, &str)]) -> Option<String> {
    if let Err(why) = File::options().read(true).write(true).open("/dev/kvm") {
        return Some(format!("/dev/kvm cannot be opened: {why}"));
    }
    // The owner of this directory is the effective user.
    if !fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
        return Some("this needs root".to_owned());
    }
    for (variable, file) in built {
        let Some(dir) = env::var_os(variable) else {
            return Some(format!("{variable} is not set (run `cargo xtask test`)"));
        };
        let path = PathBuf::from(dir).join(file);
        if !path.exists() {
            let path = path.display();
            return Some(format!("{path} is missing (run `cargo xtask test`)"));
        }
    }
    None
}

/// Runs the cases that the command line selects. `lack` returns what this host lacks for the case of that name, or
/// `None` if the case can run.
pub fn run(
    cases: impl IntoIterator<Item = Case>,
    lack: fn(&'static str) -> Option<String>,
) -> Conclusion {
    let mut arguments = Arguments::from_args();
    // Parallel VMs would distort the times that tests measure: run one test at a time unless the command line says
    // otherwise.
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
        // Checked again because `--ignored` also runs cases that this host lacks something for.
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
        Some("no /dev/kvm".to_owned())
    }

    #[test]
    fn cases_are_named_after_their_functions() {
        let names = cases! { lives::{kvm_one, soak_two} }.map(|case| case.name);
        assert_eq!(names, ["kvm_one", "soak_two"]);
    }

    #[test]
    fn soak_cases_and_cases_that_cannot_run_are_ignored() {
        let ignored = |lack| {
            cases! { lives::{kvm_one, soak_two} }.map(|case| trial(case, lack).has_ignored_flag())
        };
        assert_eq!(ignored(nothing), [false, true]);
        assert_eq!(ignored(everything), [true, true]);
    }
}
