//! Errors as people read them.

/// An error and its causes in one line, `a: b: c`: how failures are told in answers and by programs.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        source = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer {0}")]
    struct Outer(u8, #[source] std::fmt::Error);

    #[test]
    fn causes_follow_what_they_caused() {
        let cause = std::fmt::Error.to_string();
        assert_eq!(
            chain(&Outer(1, std::fmt::Error)),
            format!("outer 1: {cause}")
        );
        assert_eq!(chain(&std::fmt::Error), cause);
    }
}
