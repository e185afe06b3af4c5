//! Derives a finding from the outputs of two sandboxes. The functions are pure.

use super::{
    finding::{Between, Finding, HazardResult, Weight},
    list::{Hazard, Rule},
};

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
) -> Finding {
    let result = match pair {
        [Ok(first), Ok(second)] => rule(hazard, &lines(first), &lines(second), parent),
        [Err(_), _] | [_, Err(_)] => HazardResult::NotTried,
    };
    Finding {
        hazard: hazard.name.clone(),
        between,
        why: hazard.why.clone(),
        expected: match (&hazard.known, &hazard.warns) {
            (Some(why), _) => format!("{}; known: {why}", hazard.rule.expected()),
            (None, Some(advice)) => format!("{}; otherwise: {advice}", hazard.rule.expected()),
            (None, None) => hazard.rule.expected().to_owned(),
        },
        result: match (result, &hazard.known, &hazard.warns) {
            (HazardResult::Fail, Some(_), _) => HazardResult::Known,
            (HazardResult::Fail, None, Some(_)) => HazardResult::Warned,
            (result, _, _) => result,
        },
        weight: match hazard.rule {
            Rule::Same => Weight::Gate,
            Rule::Differs | Rule::Nothing | Rule::Private => Weight::Breach,
        },
        evidence: pair.iter().map(evidence).collect(),
    }
}

/// Finding for a hazard whose subject does not exist in the template.
pub(super) fn absent(hazard: &Hazard, between: Between, why: &str) -> Finding {
    let none = [Err(why.to_owned()), Err(why.to_owned())];
    Finding {
        result: HazardResult::Absent,
        evidence: vec![why.to_owned()],
        ..evaluate(hazard, between, &none, None)
    }
}

fn rule(hazard: &Hazard, first: &[&str], second: &[&str], parent: Option<&Answer>) -> HazardResult {
    let silent = first.is_empty() || second.is_empty();
    let holds = match hazard.rule {
        Rule::Differs if hazard.optional && first.is_empty() && second.is_empty() => {
            return HazardResult::Absent;
        }
        Rule::Differs | Rule::Same if silent => return HazardResult::NotTried,
        Rule::Differs => !first.iter().any(|line| second.contains(line)),
        Rule::Same => match parent {
            Some(Ok(parent)) => first == second && first == lines(parent),
            Some(Err(_)) | None => return HazardResult::NotTried,
        },
        Rule::Nothing => first.is_empty() && second.is_empty(),
        Rule::Private if first.is_empty() => return HazardResult::NotTried,
        Rule::Private => second.is_empty(),
    };
    if holds {
        HazardResult::Pass
    } else {
        HazardResult::Fail
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

    fn result(hazard: &Hazard, first: &str, second: &str) -> HazardResult {
        let pair = [Ok(first.to_owned()), Ok(second.to_owned())];
        let parent = Ok("a\n".to_owned());
        evaluate(hazard, Between::Forks, &pair, Some(&parent)).result
    }

    #[test]
    fn each_rule_compares_the_answers_in_its_way() {
        use HazardResult::{Fail, NotTried, Pass};
        for (rule, first, second, wanted) in [
            (Rule::Differs, "a\nb", "c\nd", Pass),
            (Rule::Differs, "a\nb", "c\nb", Fail),
            (Rule::Differs, "a", " a \n", Fail),
            (Rule::Differs, "", "a", NotTried),
            (Rule::Differs, "", "", NotTried),
            (Rule::Same, "a", "a", Pass),
            (Rule::Same, "a", "b", Fail),
            // Both forks lost the parent's value.
            (Rule::Same, "b", "b", Fail),
            (Rule::Same, "", "", NotTried),
            (Rule::Nothing, "", " \n", Pass),
            (Rule::Nothing, "", "left", Fail),
            (Rule::Private, "mine", "", Pass),
            (Rule::Private, "mine", "mine", Fail),
            (Rule::Private, "", "", NotTried),
        ] {
            let got = result(&hazard(rule), first, second);
            assert_eq!(got, wanted, "{rule:?} {first:?} {second:?}");
        }
    }

    #[test]
    fn optional_and_known_hazards_do_not_fail() {
        let mut optional = hazard(Rule::Differs);
        optional.optional = true;
        assert_eq!(result(&optional, "", ""), HazardResult::Absent);
        assert_eq!(result(&optional, "a", ""), HazardResult::NotTried);
        assert_eq!(result(&optional, "a", "a"), HazardResult::Fail);
        let mut known = hazard(Rule::Differs);
        known.known = Some("it stays".to_owned());
        assert_eq!(result(&known, "a", "a"), HazardResult::Known);
        assert_eq!(result(&known, "a", "b"), HazardResult::Pass);
        let mut warns = hazard(Rule::Differs);
        warns.warns = Some("draw it anew".to_owned());
        assert_eq!(result(&warns, "a", "a"), HazardResult::Warned);
        assert_eq!(result(&warns, "a", "b"), HazardResult::Pass);
        assert_eq!(result(&warns, "a", ""), HazardResult::NotTried);
        let absent = absent(&warns, Between::Clones, "there is none");
        assert_eq!(
            (absent.result, &absent.evidence[..]),
            (HazardResult::Absent, &["there is none".to_owned()][..])
        );
    }

    #[test]
    fn without_both_answers_a_hazard_is_not_tried_under_any_rule() {
        for rule in [Rule::Differs, Rule::Same, Rule::Nothing, Rule::Private] {
            let pair = [Ok("a".to_owned()), Err("refused\u{1b}[2J".to_owned())];
            let finding = evaluate(&hazard(rule), Between::Clones, &pair, None);
            assert_eq!(finding.result, HazardResult::NotTried, "{rule:?}");
            assert_eq!(finding.evidence[1], "no answer: refused?[2J");
        }
    }

    #[test]
    fn evidence_is_short() {
        let many = "x\n".repeat(100);
        assert!(evidence(&Ok(many)).ends_with("x and 92 more lines"));
        assert_eq!(evidence(&Ok("y".repeat(1000))).len(), KEPT_CHARS);
    }
}
