//! The observations of a case, and the verdict that follows from them.

use crate::report::{Case, Verdict};

/// Observations of an attempt, or of a part of it.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// Findings of the probe in the guest, for the report.
    pub(super) guest: String,
    /// Traffic that got through but must not.
    pub(super) breaches: Vec<String>,
    /// Missing or contradicting observations, without which the attempt proves nothing.
    pub(super) doubts: Vec<String>,
}

impl Observed {
    pub(super) fn breach_if(&mut self, is_so: bool, what: impl Into<String>) {
        if is_so {
            self.breaches.push(what.into());
        }
    }

    pub(super) fn doubt_unless(&mut self, is_so: bool, what: impl Into<String>) {
        if !is_so {
            self.doubts.push(what.into());
        }
    }

    /// Adds the observations of a part of the attempt.
    pub(super) fn add(&mut self, part: Self) {
        self.guest += &part.guest;
        self.breaches.extend(part.breaches);
        self.doubts.extend(part.doubts);
    }

    /// The case with the verdict on these observations: a breach outweighs all doubts, and with any doubt the case does
    /// not pass.
    pub(super) fn judge(self, case: Case) -> Case {
        let verdict = match (self.breaches.as_slice(), self.doubts.as_slice()) {
            ([], []) => Verdict::Pass,
            ([], _) => Verdict::Unproven,
            (_, _) => Verdict::Breach,
        };
        let problems = self.breaches.into_iter().chain(self.doubts);
        case.with("guest", self.guest).judged(verdict, problems)
    }
}
