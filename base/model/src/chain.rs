//! One line of text from an error and its causes.

use std::error::Error;

/// Formats an error and its causes as one line, outermost first, such as `cannot start: cannot open disk.img:
/// permission denied`.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
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
    fn causes_follow_the_error_in_order() {
        let cause = std::fmt::Error.to_string();
        assert_eq!(
            chain(&Outer(1, std::fmt::Error)),
            format!("outer 1: {cause}")
        );
        assert_eq!(chain(&std::fmt::Error), cause);
    }
}
