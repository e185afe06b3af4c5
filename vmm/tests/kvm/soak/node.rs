//! Node's own tests, from the source of Debian's package.

use super::suite::{LOG, Outcome, Outcomes, RESULT, Suite};

/// Tests of kernel features: processes, files, sockets, signals, threads, timers. The others test the language and
/// libraries. Names of files below `test/`.
const SELECTED: [&str; 13] = [
    "parallel/test-child-process-*",
    "parallel/test-cluster-*",
    "parallel/test-dgram-*",
    "parallel/test-fs-*",
    "parallel/test-net-*",
    "parallel/test-os-*",
    "parallel/test-pipe-*",
    "parallel/test-process-*",
    "parallel/test-signal-*",
    "parallel/test-std*",
    "parallel/test-timers-*",
    "parallel/test-worker-*",
    "pseudo-tty/*",
];

pub(crate) fn soak_node_test_suite_as_on_the_host() {
    Suite {
        archive: "node/suite.tar",
        parts: &SELECTED,
        run: |files| script(2, files),
        repeat: |tests| script(1, tests),
        parse,
        differences: include_str!("node.txt"),
        least: 800,
    }
    .compare();
}

fn script(jobs: usize, files: &[String]) -> String {
    let files: Vec<String> = files.iter().map(|file| format!("'{file}'")).collect();
    format!(
        "cd /node-v*; timeout -s KILL 3000 python3 tools/test.py --shell /usr/bin/node -p tap -j{jobs} -t 240 \
         {} >{RESULT} 2>{LOG}; cat {RESULT} >>{LOG}",
        files.join(" ")
    )
}

/// TAP: `ok 3 parallel/test-x`, `not ok 4 parallel/test-y`, `ok 5 parallel/test-z # skip reason`.
fn parse(tap: &str) -> Outcomes {
    let mut outcomes = Outcomes::new();
    for line in tap.lines() {
        let (line, skipped) = match line.split_once(" # skip ") {
            Some((line, reason)) => (line, Some(reason)),
            None => (line, None),
        };
        let mut words = line.split(' ').rev();
        let (Some(name), Some(number), Some("ok")) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        if number.parse::<u32>().is_err() {
            continue;
        }
        let outcome = match (skipped, words.next()) {
            (Some(reason), _) => Outcome::Skipped(reason.to_owned()),
            (None, Some("not")) => Outcome::Failed,
            (None, _) => Outcome::Passed,
        };
        outcomes.insert(name.to_owned(), outcome);
    }
    outcomes
}
