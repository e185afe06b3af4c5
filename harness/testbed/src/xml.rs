//! Text in XML reports.

/// Escapes `text` for an attribute value. Control characters, most of which XML does not allow, become spaces.
#[must_use]
pub fn escape(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '&' => "&amp;".to_owned(),
            '<' => "&lt;".to_owned(),
            '>' => "&gt;".to_owned(),
            '"' => "&quot;".to_owned(),
            c if c.is_control() => " ".to_owned(),
            c => c.to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_and_control_characters_are_escaped() {
        assert_eq!(escape("<a b=\"&\">\u{1}"), "&lt;a b=&quot;&amp;&quot;&gt; ");
    }
}
