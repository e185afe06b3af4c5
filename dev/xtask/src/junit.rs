//! Tests that cannot run on this host. Each prints a line `skipped: REASON` and returns, so runners count it as passed.

/// Path of the report in cargo's target directory. `dev/xtask/nextest.toml` orders it, with the output of tests that passed.
pub(crate) const REPORT: &str = "nextest/default/junit.xml";

/// The names of the tests that stated a reason, each with the first one.
pub(crate) fn skipped(report: &str) -> Vec<(&str, &str)> {
    let cases = report.split("<testcase ").skip(1);
    cases
        .filter_map(|case| {
            let name = case.split_once("name=\"")?.1.split('"').next()?;
            // Output begins after the `>` of its element.
            let mut lines = case.split(['\n', '>']);
            let why = lines.find_map(reason)?;
            Some((name, why.split('<').next().unwrap_or(why)))
        })
        .collect()
}

/// The reason stated in a line of a test's output. libtest may have begun the line with `test NAME ... `.
pub(crate) fn reason(line: &str) -> Option<&str> {
    let own = line.rsplit_once(" ... ").map_or(line, |(_, own)| own);
    own.strip_prefix("skipped: ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_state_a_reason_are_skipped() {
        let report = "<testsuite name=\"a\"><testcase name=\"one\" classname=\"c\">\n\
             <system-out>\nrunning 1 test\nskipped: needs root\ntest one ... ok</system-out></testcase>\n\
             <testcase name=\"two\"><system-err>test two ... skipped: no python3</system-err></testcase>\n\
             <testcase name=\"three\"><system-out>0 skipped: x</system-out></testcase>";
        let expected = [("one", "needs root"), ("two", "no python3")];
        assert_eq!(skipped(report), expected);
    }
}
