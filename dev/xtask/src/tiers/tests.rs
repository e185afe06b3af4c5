use super::*;

fn counts(passed: u64, failed: u64, skipped: u64) -> Option<Counts> {
    Some(Counts {
        passed,
        failed,
        skipped,
    })
}

#[test]
fn summary_lines_of_both_runners_are_parsed() {
    let nextest = [
        (
            "  Summary [ 0.004s] 3 tests run: 3 passed, 1 skipped",
            counts(3, 0, 1),
        ),
        (
            "  Summary [ 1.0s] 7/9 tests run: 3 passed (1 slow), 2 failed, 1 timed out, 4 skipped",
            counts(3, 3, 4),
        ),
        (
            "test result: FAILED. 0 passed; 1 failed; 9 filtered out",
            None,
        ),
    ];
    for (line, want) in nextest {
        assert_eq!(summary(Runner::Nextest, line), want, "{line}");
    }
    let cargo = [
        (
            "test result: FAILED. 5 passed; 1 failed; 2 ignored; 0 measured; 3 filtered out",
            counts(5, 1, 5),
        ),
        ("test result is fine", None),
        ("test kvm_boot ... ok", None),
    ];
    for (line, want) in cargo {
        assert_eq!(summary(Runner::CargoTest, line), want, "{line}");
    }
}

#[test]
fn the_time_of_a_test_is_read() {
    let line = "        PASS [  80.495s] ( 301/2051) api::cluster cluster_three";
    let expected = (80.495, "api::cluster cluster_three".to_owned());
    assert_eq!(time_of_test(line), Some(expected));
    assert_eq!(time_of_test("  SLOW [> 60.000s] (───) api x"), None);
}

#[test]
fn the_nextest_filter_selects_exactly_the_requested_tiers() {
    let all = Selection::All;
    assert_eq!(filter(&[Tier::Kvm], &all), "test(/(^|::)kvm_/)");
    let usual = filter(&[Tier::Kvm], &Selection::Usual);
    assert!(
        usual.starts_with("test(/(^|::)(kvm_boot_with_patched_hypercalls|kvm_"),
        "{usual}"
    );
    assert_eq!(
        filter(&[Tier::Unit, Tier::Net], &all),
        "test(/(^|::)net_/) + not (test(/(^|::)net_/) + test(/(^|::)image_/) + \
             test(/(^|::)kvm_/) + test(/(^|::)interpreter_/) + test(/(^|::)cluster_/))"
    );
}

#[test]
fn tests_that_state_a_reason_count_as_skipped() {
    let mut command = Command::new("sh");
    let lines = "skipped: needs root\ntest result: ok. 3 passed; 0 failed; 1 ignored;";
    command.args(["-c", &format!("printf '{lines}\n'")]);
    let outcome = watch(&mut command, Runner::CargoTest, &mut Vec::new()).unwrap();
    assert_eq!(Some(outcome.counts), counts(2, 0, 2));
}

#[test]
fn cargo_runs_the_usual_tests_of_the_tier_kvm_and_no_others() {
    let workspace = Workspace::locate().unwrap();
    let arguments = |selection: &Selection| -> Vec<Vec<String>> {
        let commands = cargo_test(&workspace, &[Tier::Unit, Tier::Kvm], selection);
        let text = |word: &std::ffi::OsStr| word.to_string_lossy().into_owned();
        let words = |command: &Command| command.get_args().map(text).collect();
        commands.iter().map(words).collect()
    };
    let skips_kvm = |words: &[String]| words.windows(2).any(|two| two == ["--skip", "kvm_"]);
    let all = arguments(&Selection::All);
    assert!(all.len() == 1 && !skips_kvm(&all[0]), "{all:?}");
    let usual = arguments(&Selection::Usual);
    assert!(usual.len() == 2 && skips_kvm(&usual[0]), "{usual:?}");
    assert!(
        usual[1].ends_with(
            &usual_kvm_tests()
                .into_iter()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        )
    );
}

#[test]
fn a_runner_that_fails_without_a_failed_test_counts_as_one() {
    for (failed, code, expected) in [(0, 0, 0), (0, 1, 1), (2, 1, 2)] {
        let mut command = Command::new("sh");
        let line = format!("test result: ok. 2 passed; {failed} failed;");
        command.args(["-c", &format!("echo '{line}' >&2; exit {code}")]);
        let outcome = watch(&mut command, Runner::CargoTest, &mut Vec::new()).unwrap();
        assert_eq!(outcome.success, code == 0);
        assert_eq!(Some(outcome.counts), counts(2, expected, 0), "{line}");
    }
}
