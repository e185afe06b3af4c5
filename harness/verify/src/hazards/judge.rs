//! From answers to a finding. Pure.

use super::{
    Between, Finding, Verdict, Weight,
    list::{Hazard, Rule},
};

/// Lines of an answer that are kept as evidence.
const KEPT_LINES: usize = 8;
/// Characters of a line that are kept.
const KEPT_CHARS: usize = 160;

/// What a probe said in one sandbox, or why it said nothing.
pub(super) type Answer = Result<String, String>;

/// The finding of a hazard from the answers of the first sandbox, the second, and of their parent if there is
/// one.
pub(super) fn judge(
    hazard: &Hazard,
    between: Between,
    pair: &[Answer; 2],
    parent: Option<&Answer>,
) -> Finding {
    let verdict = match pair {
        [Ok(first), Ok(second)] => rule(hazard, &lines(first), &lines(second), parent),
        [Err(_), _] | [_, Err(_)] => Verdict::NotTried,
    };
    Finding {
        hazard: hazard.name.clone(),
        between,
        why: hazard.why.clone(),
        expected: match &hazard.known {
            Some(why) => format!("{}; known: {why}", hazard.rule.expected()),
            None => hazard.rule.expected().to_owned(),
        },
        verdict: match (verdict, &hazard.known) {
            (Verdict::Fail, Some(_)) => Verdict::Known,
            (verdict, _) => verdict,
        },
        weight: match hazard.rule {
            Rule::Same => Weight::Gate,
            Rule::Differs | Rule::Nothing | Rule::Private => Weight::Breach,
        },
        evidence: pair.iter().map(evidence).collect(),
    }
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
    if holds { Verdict::Pass } else { Verdict::Fail }
}

/// Without blanks around them and without empty ones.
fn lines(answer: &str) -> Vec<&str> {
    let lines = answer.lines().map(str::trim);
    lines.filter(|line| !line.is_empty()).collect()
}

/// Answers come from guests: short, and without characters that steer terminals.
fn evidence(answer: &Answer) -> String {
    let (said, text) = match answer {
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
        "says nothing".to_owned()
    } else {
        format!("{said}{}{more}", kept.join(" | "))
    }
}

/// A bounded line without control characters.
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
            sabotage: None,
        }
    }

    fn verdict(hazard: &Hazard, first: &str, second: &str) -> Verdict {
        let pair = [Ok(first.to_owned()), Ok(second.to_owned())];
        let parent = Ok("a\n".to_owned());
        judge(hazard, Between::Forks, &pair, Some(&parent)).verdict
    }

    #[test]
    fn answers_are_judged_by_their_rule() {
        use Verdict::{Fail, NotTried, Pass};
        for (rule, first, second, wanted) in [
            (Rule::Differs, "a\nb", "c\nd", Pass),
            (Rule::Differs, "a\nb", "c\nb", Fail),
            (Rule::Differs, "a", " a \n", Fail),
            (Rule::Differs, "", "a", NotTried),
            (Rule::Differs, "", "", NotTried),
            (Rule::Same, "a", "a", Pass),
            (Rule::Same, "a", "b", Fail),
            // Both lost what the parent had.
            (Rule::Same, "b", "b", Fail),
            (Rule::Same, "", "", NotTried),
            (Rule::Nothing, "", " \n", Pass),
            (Rule::Nothing, "", "left", Fail),
            (Rule::Private, "mine", "", Pass),
            (Rule::Private, "mine", "mine", Fail),
            (Rule::Private, "", "", NotTried),
        ] {
            let got = verdict(&hazard(rule), first, second);
            assert_eq!(got, wanted, "{rule:?} {first:?} {second:?}");
        }
    }

    #[test]
    fn what_may_be_missing_or_is_known_fails_nothing() {
        let mut optional = hazard(Rule::Differs);
        optional.optional = true;
        assert_eq!(verdict(&optional, "", ""), Verdict::Absent);
        assert_eq!(verdict(&optional, "a", ""), Verdict::NotTried);
        assert_eq!(verdict(&optional, "a", "a"), Verdict::Fail);
        let mut known = hazard(Rule::Differs);
        known.known = Some("it stays".to_owned());
        assert_eq!(verdict(&known, "a", "a"), Verdict::Known);
        assert_eq!(verdict(&known, "a", "b"), Verdict::Pass);
    }

    #[test]
    fn a_missing_answer_is_no_pass_whatever_the_rule() {
        for rule in [Rule::Differs, Rule::Same, Rule::Nothing, Rule::Private] {
            let pair = [Ok("a".to_owned()), Err("refused\u{1b}[2J".to_owned())];
            let finding = judge(&hazard(rule), Between::Clones, &pair, None);
            assert_eq!(finding.verdict, Verdict::NotTried, "{rule:?}");
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
