//! Checks goals next to measured figures: a figure that misses its goal must be marked as missed.

use super::numbers;

const MARK: &str = "**MISSED**";

/// Why the mark of a row is wrong; `None` if it is right or the row has no goal.
///
/// A goal is an upper limit in the unit of the figure. Two goals apply to the two quantiles of the row; one goal
/// applies to the larger quantile.
pub(super) fn wrong(measured: &str, goal: &str) -> Option<String> {
    let goals = parsed(goal)?;
    let before = measured.split(['(', ':', ',']).next().unwrap_or_default();
    let figures = parsed(before).unwrap_or_default();
    let from = figures.len().saturating_sub(goals.len());
    if goals.len() > figures.len() || goals.len() > 2 {
        return Some(format!(
            "the goal {goal:?} does not match the figures {measured:?}"
        ));
    }
    let is_missed = figures[from..]
        .iter()
        .zip(&goals)
        .any(|(figure, goal)| figure > goal);
    match (is_missed, measured.contains(MARK)) {
        (true, false) => Some(format!(
            "{measured:?} misses the goal {goal:?} without {MARK}"
        )),
        (false, true) => Some(format!(
            "{measured:?} is within the goal {goal:?} and marked {MARK}"
        )),
        (true, true) | (false, false) => None,
    }
}

/// The numbers of a text; `None` if it has none.
fn parsed(text: &str) -> Option<Vec<f64>> {
    let found: Vec<f64> = numbers(text)
        .iter()
        .filter_map(|n| n.parse().ok())
        .collect();
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_beyond_its_goal_must_be_marked_as_missed() {
        for right in [
            ("2.8 / 5.6 ms", "8 ms"),
            ("7.2 / 11.1 ms", "12 / 25 ms"),
            ("74 / 113 ms: **MISSED**", "90 ms"),
            ("3.86 MB (95 % 3.85 to 3.88)", "5 MB"),
            ("15.3 / 30 ms, 3 % from a warm slot", "60 ms"),
            ("0.93 s", "1 s"),
            ("99 ms", ""),
        ] {
            assert_eq!(wrong(right.0, right.1), None, "{right:?}");
        }
        let unmarked = wrong("74 / 113 ms", "90 ms").unwrap();
        assert!(unmarked.contains("without"), "{unmarked}");
        let first_of_two = wrong("13 / 20 ms", "12 / 25 ms").unwrap();
        assert!(first_of_two.contains("without"), "{first_of_two}");
        let marked = wrong("74 / 80 ms: **MISSED**", "90 ms").unwrap();
        assert!(marked.contains("is within"), "{marked}");
        assert!(wrong("7 ms", "1 / 2 ms").is_some());
    }
}
