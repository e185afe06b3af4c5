//! Derives a finding from the outputs of two sandboxes. The functions are pure.

use super::list::{Between, Hazard, Rule};
use crate::report::{Case, Verdict};

/// Lines of an output that a report quotes.
const KEPT_LINES: usize = 8;
/// Characters of a line that a report quotes.
const KEPT_CHARS: usize = 160;

/// Output of a probe in one sandbox, or the reason why there is none.
pub(super) type Answer = Result<String, String>;

/// Compares the outputs of two sandboxes by the hazard's rule. Forks are also compared with their parent.
pub(super) fn evaluate(
    hazard: &Hazard,
    between: Between,
    pair: &[Answer; 2],
    parent: Option<&Answer>,
) -> Case {
    let verdict = match pair {
        [Ok(first), Ok(second)] => rule(hazard, &lines(first), &lines(second), parent),
        [Err(_), _] | [_, Err(_)] => Verdict::NotTried,
    };
    let verdict = match (verdict, &hazard.known, &hazard.warns) {
        (Verdict::Breach | Verdict::Fail, Some(_), _) => Verdict::Known,
        (Verdict::Breach | Verdict::Fail, None, Some(_)) => Verdict::Warned,
        (verdict, _, _) => verdict,
    };
    let case = Case {
        expected: match (&hazard.known, &hazard.warns) {
            (Some(why), _) => format!("{}; known: {why}", hazard.rule.expected()),
            (None, Some(advice)) => format!("{}; otherwise: {advice}", hazard.rule.expected()),
            (None, None) => hazard.rule.expected().to_owned(),
        },
        ..Case::new(between.name(), &hazard.name, &hazard.why)
    };
    let [first, second] = pair;
    case.with("first", evidence(first))
        .with("second", evidence(second))
        .judged(verdict, [""; 0])
}

/// Case for a hazard whose subject does not exist in the template.
pub(super) fn absent(hazard: &Hazard, between: Between, why: &str) -> Case {
    Case::new(between.name(), &hazard.name, &hazard.why).judged(Verdict::Absent, [why])
}

fn rule(hazard: &Hazard, first: &[&str], second: &[&str], parent: Option<&Answer>) -> Verdict {
    let silent = first.is_empty() || second.is_empty();
    let holds = match hazard.rule {
        Rule::Differs if hazard.optional && first.is_empty() && second.is_empty() => {
            return Verdict::Absent;
        }
        Rule::Differs | Rule::Same if silent => return Verdict::NotTried,
        Rule::Differs => !first.iter().any(|line| second.contains(line)),
        Rule::Same => match parent {
            Some(Ok(parent)) => first == second && first == lines(parent),
            Some(Err(_)) | None => return Verdict::NotTried,
        },
        Rule::Nothing => first.is_empty() && second.is_empty(),
        Rule::Private if first.is_empty() => return Verdict::NotTried,
        Rule::Private => second.is_empty(),
    };
    if holds {
        Verdict::Pass
    } else {
        hazard.rule.broken()
    }
}

/// The trimmed, non-empty lines of an output.
fn lines(answer: &str) -> Vec<&str> {
    let lines = answer.lines().map(str::trim);
    lines.filter(|line| !line.is_empty()).collect()
}

/// An output, prepared for a report. It comes from a guest, so it is shortened and control characters are replaced.
fn evidence(answer: &Answer) -> String {
    let (prefix, text) = match answer {
        Ok(text) => ("", text),
        Err(why) => ("no answer: ", why),
    };
    let all = lines(text);
    let kept: Vec<String> = all.iter().take(KEPT_LINES).map(|l| printable(l)).collect();
    let more = match all.len().saturating_sub(KEPT_LINES) {
        0 => String::new(),
        more => format!(" and {more} more lines"),
    };
    if kept.is_empty() && answer.is_ok() {
        "the answer is empty".to_owned()
    } else {
        format!("{prefix}{}{more}", kept.join(" | "))
    }
}

/// A line with a bounded length and without control characters.
pub(super) fn printable(line: &str) -> String {
    let plain = line.chars().map(|c| if c.is_control() { '?' } else { c });
    plain.take(KEPT_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hazards::list::Runner;

    fn hazard(rule: Rule) -> Hazard {
        Hazard {
            name: "h".to_owned(),
            why: "w".to_owned(),
            rule,
            runner: Runner::Shell,
            probe: String::new(),
            between: vec![Between::Clones],
            before: None,
            write: None,
            root: false,
            optional: false,
            known: None,
            warns: None,
            sabotage: None,
        }
    }

    fn verdict(hazard: &Hazard, first: &str, second: &str) -> Verdict {
        let pair = [Ok(first.to_owned()), Ok(second.to_owned())];
        let parent = Ok("a\n".to_owned());
        evaluate(hazard, Between::Forks, &pair, Some(&parent)).verdict
    }

    #[test]
    fn each_rule_compares_the_answers_in_its_way() {
        use Verdict::{Breach, Fail, NotTried, Pass};
        for (rule, first, second, wanted) in [
            (Rule::Differs, "a\nb", "c\nd", Pass),
            (Rule::Differs, "a\nb", "c\nb", Breach),
            (Rule::Differs, "a", " a \n", Breach),
            (Rule::Differs, "", "a", NotTried),
            (Rule::Differs, "", "", NotTried),
            (Rule::Same, "a", "a", Pass),
            (Rule::Same, "a", "b", Fail),
            // Both forks lost the parent's value.
            (Rule::Same, "b", "b", Fail),
            (Rule::Same, "", "", NotTried),
            (Rule::Nothing, "", " \n", Pass),
            (Rule::Nothing, "", "left", Breach),
            (Rule::Private, "mine", "", Pass),
            (Rule::Private, "mine", "mine", Breach),
            (Rule::Private, "", "", NotTried),
        ] {
            let got = verdict(&hazard(rule), first, second);
            assert_eq!(got, wanted, "{rule:?} {first:?} {second:?}");
        }
    }

    #[test]
    fn optional_and_known_hazards_do_not_fail() {
        let mut optional = hazard(Rule::Differs);
        optional.optional = true;
        assert_eq!(verdict(&optional, "", ""), Verdict::Absent);
        assert_eq!(verdict(&optional, "a", ""), Verdict::NotTried);
        assert_eq!(verdict(&optional, "a", "a"), Verdict::Breach);
        let mut known = hazard(Rule::Differs);
        known.known = Some("it stays".to_owned());
        assert_eq!(verdict(&known, "a", "a"), Verdict::Known);
        assert_eq!(verdict(&known, "a", "b"), Verdict::Pass);
        let mut warns = hazard(Rule::Differs);
        warns.warns = Some("draw it anew".to_owned());
        assert_eq!(verdict(&warns, "a", "a"), Verdict::Warned);
        assert_eq!(verdict(&warns, "a", "b"), Verdict::Pass);
        assert_eq!(verdict(&warns, "a", ""), Verdict::NotTried);
        let absent = absent(&warns, Between::Clones, "there is none");
        assert_eq!(
            (absent.verdict, &absent.problems[..]),
            (Verdict::Absent, &["there is none".to_owned()][..])
        );
    }

    #[test]
    fn without_both_answers_a_hazard_is_not_tried_under_any_rule() {
        for rule in [Rule::Differs, Rule::Same, Rule::Nothing, Rule::Private] {
            let pair = [Ok("a".to_owned()), Err("refused\u{1b}[2J".to_owned())];
            let case = evaluate(&hazard(rule), Between::Clones, &pair, None);
            assert_eq!(case.verdict, Verdict::NotTried, "{rule:?}");
            assert_eq!(case.evidence["second"], "no answer: refused?[2J");
        }
    }

    #[test]
    fn evidence_is_short() {
        let many = "x\n".repeat(100);
        assert!(evidence(&Ok(many)).ends_with("x and 92 more lines"));
        assert_eq!(evidence(&Ok("y".repeat(1000))).len(), KEPT_CHARS);
    }
}
