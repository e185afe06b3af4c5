//! Origin and steps of a build.

use std::fmt;

/// The origin of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum From {
    /// Reference of an OCI image, as the client wrote it.
    Image(String),
    /// Id or name of a template in the pool. It need not exist.
    Template(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub kind: StepKind,
    pub args: Vec<String>,
    /// Hash of the uploaded files of a COPY: 64 lower-case hex digits. The client computes it from a recipe; it is not
    /// the hash of the archive.
    pub files: Option<String>,
    /// Run this step and all later ones, ignoring the cache.
    pub force: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepKind {
    Run,
    Copy,
    /// ENV and ARG.
    Env,
    Workdir,
    User,
}

impl StepKind {
    /// Parses a step type, ignoring case. `None` for an unknown type.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_uppercase().as_str() {
            "RUN" => Some(Self::Run),
            "COPY" => Some(Self::Copy),
            "ENV" | "ARG" => Some(Self::Env),
            "WORKDIR" => Some(Self::Workdir),
            "USER" => Some(Self::User),
            _ => None,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "RUN",
            Self::Copy => "COPY",
            Self::Env => "ENV",
            Self::Workdir => "WORKDIR",
            Self::User => "USER",
        }
    }
}

/// The part of a build that a log entry or a failure belongs to. Clients map its text, the `step`, to a line of their
/// program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Everything before the first step.
    Base,
    /// A step of the plan, counted from 1.
    Step(usize),
    /// Everything after the last step.
    Finalize,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base => f.write_str("base"),
            Self::Step(number) => write!(f, "{number}"),
            Self::Finalize => f.write_str("finalize"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_build_have_the_texts_that_clients_parse() {
        let texts = [At::Base, At::Step(12), At::Finalize].map(|at| at.to_string());
        assert_eq!(texts, ["base", "12", "finalize"]);
    }

    #[test]
    fn step_types_are_read_in_any_case() {
        for kind in [
            StepKind::Run,
            StepKind::Copy,
            StepKind::Env,
            StepKind::Workdir,
            StepKind::User,
        ] {
            assert_eq!(StepKind::parse(&kind.name().to_lowercase()), Some(kind));
        }
        assert_eq!(StepKind::parse("arg"), Some(StepKind::Env));
        assert_eq!(StepKind::parse("HEALTHCHECK"), None);
    }
}
