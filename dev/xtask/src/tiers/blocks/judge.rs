//! Compares the output of a step with the documented output.

/// Stands for any text in a line, and alone in a line for any number of lines.
const ANY: char = '…';

/// Whether an output matches the documented one. Blanks at the end of lines and empty lines at the end are ignored.
pub(super) fn matches(documented: &str, printed: &str) -> bool {
    lines_match(&lines(documented), &lines(printed))
}

fn lines(text: &str) -> Vec<&str> {
    text.trim_end().lines().map(str::trim_end).collect()
}

fn lines_match(documented: &[&str], printed: &[&str]) -> bool {
    match (documented, printed) {
        ([], printed) => printed.is_empty(),
        ([first, rest @ ..], printed) if first.trim() == ANY.to_string() => {
            (0..=printed.len()).any(|skipped| lines_match(rest, &printed[skipped..]))
        }
        ([first, rest @ ..], [line, others @ ..]) => {
            line_matches(first, line) && lines_match(rest, others)
        }
        ([_, ..], []) => false,
    }
}

fn line_matches(documented: &str, line: &str) -> bool {
    let mut parts = documented.split(ANY);
    let Some(mut rest) = line.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_stand_for_text_or_lines_and_everything_else_must_be_equal() {
        for (documented, printed) in [
            ("42\n", "42\n\n"),
            ("ran in … ms: …", "ran in 23 ms: hello"),
            ("a\n…\nz\n", "a\nb\nc\nz\n"),
            ("a\n…\n", "a\n"),
            ("…", ""),
        ] {
            assert!(matches(documented, printed), "{documented:?} {printed:?}");
        }
        for (documented, printed) in [
            ("42", "43"),
            ("ran in … ms: hello", "ran in 23 s: hello"),
            ("a\n…\nz", "a\nb\n"),
            ("a", "a\nb"),
            ("", "a"),
            ("a…a", "a"),
        ] {
            assert!(!matches(documented, printed), "{documented:?} {printed:?}");
        }
    }
}
