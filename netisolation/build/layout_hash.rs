//! The hash that names the layout of the maps. Shared by the build script and its tests.

/// FNV-1a over the C tokens of the files. Comments and whitespace do not change it.
pub(crate) fn layout_hash<'a>(sources: impl IntoIterator<Item = &'a str>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for source in sources {
        for token in tokens(source) {
            hash = token.bytes().fold(hash, step);
            // Ends the token, so that `a b` and `ab` differ.
            hash = step(hash, 0);
        }
    }
    hash
}

/// Splits C source text into words, string literals and single punctuation characters.
fn tokens(mut rest: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let (length, is_token) = if rest.starts_with("/*") {
            (rest.find("*/").map_or(rest.len(), |end| end + 2), false)
        } else if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), false)
        } else if first.is_whitespace() || rest.starts_with("\\\n") {
            (first.len_utf8(), false)
        } else if first == '"' {
            (string_length(rest), true)
        } else if is_word(first) {
            (rest.find(|c| !is_word(c)).unwrap_or(rest.len()), true)
        } else {
            (first.len_utf8(), true)
        };
        let (token, after) = rest.split_at(length);
        tokens.extend(is_token.then_some(token));
        rest = after;
    }
    tokens
}

/// Length in bytes of the string literal at the start of `text`, quotes included.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !is_escaped => return at + 1,
            '\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    text.len()
}
