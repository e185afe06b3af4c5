//! SPDX licence expressions (SPDX specification 2.3, annex D), as far as Cargo manifests use them. A slash is the
//! deprecated form of `OR`.

use std::collections::BTreeSet;

/// Whether the expression can be satisfied with licences of this set. False if the expression cannot be parsed.
pub(super) fn allows(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Reader {
        words: &words,
        allowed,
    };
    reader.any_of() == Some(true) && reader.words.is_empty()
}

/// A parser: the words that it has not parsed yet, and the allowed licences.
struct Reader<'a> {
    words: &'a [&'a str],
    allowed: &'a BTreeSet<String>,
}

impl Reader<'_> {
    /// Parses `a OR b`. `AND` binds tighter.
    fn any_of(&mut self) -> Option<bool> {
        let mut met = self.all_of()?;
        while self.take("OR") {
            met |= self.all_of()?;
        }
        Some(met)
    }

    fn all_of(&mut self) -> Option<bool> {
        let mut met = self.one()?;
        while self.take("AND") {
            met &= self.one()?;
        }
        Some(met)
    }

    /// Parses a licence or an expression in parentheses.
    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let met = self.any_of()?;
            return self.take(")").then_some(met);
        }
        let (licence, rest) = self.words.split_first()?;
        self.words = rest;
        // A licence with an exception is a separate name: the set must contain exactly "LICENCE WITH EXCEPTION".
        let name = if self.take("WITH") {
            let (exception, rest) = self.words.split_first()?;
            self.words = rest;
            format!("{licence} WITH {exception}")
        } else {
            (*licence).to_owned()
        };
        Some(self.allowed.contains(&name))
    }

    fn take(&mut self, word: &str) -> bool {
        match self.words.split_first() {
            Some((first, rest)) if *first == word => {
                self.words = rest;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_satisfied_by_allowed_licences_only() {
        let allowed = ["MIT", "Unicode-3.0"].map(str::to_owned).into();
        for (expression, met) in [
            ("MIT", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0/MIT", true),
            ("GPL-3.0 / MIT", true),
            ("MIT AND GPL-3.0", false),
            ("(GPL-3.0 OR MIT) AND Unicode-3.0", true),
            ("GPL-3.0 OR MIT AND GPL-3.0", false),
            ("MIT WITH LLVM-exception", false),
            ("Apache-2.0 WITH LLVM-exception OR MIT", true),
            ("", false),
            ("MIT MIT", false),
            ("(MIT", false),
            ("MIT OR", false),
        ] {
            assert_eq!(allows(expression, &allowed), met, "{expression:?}");
        }
    }
}
