//! Figures in docs/ next to the name of their run.

use std::{collections::BTreeSet, fs, io, path::Path};

use super::{CLAIMS_FILE, COVERED, Claims, ClaimsError, read, with_units};

/// Directory of the documents.
const DOCS: &str = "docs";
/// Cell of a row whose run is the run of the row above.
const SAME: &str = "the same";

/// One sentence for each number of milliseconds, megabytes or `per second` that is in one statement with the name
/// of a published run, but not in the list. A statement is a sentence or a table row.
pub(super) fn missing(root: &Path, claims: &Claims) -> Result<Vec<String>, ClaimsError> {
    let runs = names(&root.join("results"))?;
    let mut missing = Vec::new();
    for file in documents(root)? {
        // All figures of these documents must be listed, including those in statements that name no run.
        if COVERED.contains(&file.as_str()) {
            continue;
        }
        let document = read(&root.join(&file))?;
        missing.extend(of_document(&file, &document, &runs, claims));
    }
    Ok(missing)
}

/// Paths of all documents, relative to the root; empty if there is no [`DOCS`].
pub(super) fn documents(root: &Path) -> Result<Vec<String>, ClaimsError> {
    let mut found = Vec::new();
    let mut dirs = vec![DOCS.to_owned()];
    while let Some(dir) = dirs.pop() {
        for name in names(&root.join(&dir))? {
            let path = format!("{dir}/{name}");
            if root.join(&path).is_dir() {
                dirs.push(path);
            } else if name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Names of the entries of a directory; empty if it does not exist.
fn names(dir: &Path) -> Result<BTreeSet<String>, ClaimsError> {
    let failed = |source| ClaimsError::Read {
        path: dir.to_owned(),
        source,
    };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(failed(error)),
    };
    let name = |entry: io::Result<fs::DirEntry>| {
        let name = entry.map_err(failed)?.file_name();
        Ok(name.to_string_lossy().into_owned())
    };
    entries.map(name).collect()
}

fn of_document(
    file: &str,
    document: &str,
    runs: &BTreeSet<String>,
    claims: &Claims,
) -> Vec<String> {
    let mut missing = Vec::new();
    let mut is_cited = false;
    for statement in statements(document) {
        let is_row = statement.starts_with('|');
        let is_same = is_row && is_cited && statement.contains(SAME);
        let named = |run: &String| run != "README.md" && statement.contains(&format!("`{run}`"));
        is_cited = is_same || runs.iter().any(named);
        if !is_cited {
            continue;
        }
        for figure in with_units(&statement) {
            let mut listed = claims.claims.iter().filter(|claim| {
                claim.is_of(file) && statement.contains(&claim.text.replace('\n', " "))
            });
            if !listed.any(|claim| claim.values.iter().any(|value| value.printed == figure)) {
                missing.push(format!(
                    "{file}: {figure} in {statement:?} is not in {CLAIMS_FILE}"
                ));
            }
        }
    }
    missing
}

/// Table rows and sentences of a document, each in one line, without code blocks.
fn statements(document: &str) -> Vec<String> {
    let mut statements = Vec::new();
    let mut paragraph = String::new();
    let mut is_code = false;
    let mut end = |paragraph: &mut String| {
        let text = std::mem::take(paragraph);
        statements.extend(text.split_inclusive(". ").map(|s| s.trim().to_owned()));
    };
    let mut rows = Vec::new();
    for line in document.lines().map(str::trim) {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        if is_fence || is_code || line.is_empty() || line.starts_with(['|', '#']) {
            end(&mut paragraph);
            if line.starts_with('|') && !is_code {
                rows.push(line.to_owned());
            }
            continue;
        }
        if line.starts_with("- ") {
            end(&mut paragraph);
        }
        paragraph.push_str(line);
        paragraph.push(' ');
    }
    end(&mut paragraph);
    statements.extend(rows);
    statements.retain(|statement| !statement.is_empty());
    statements
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "single-ring3-2core-20261122";

    fn found(document: &str, claimed: &[(&str, &str)]) -> Vec<String> {
        let list: String = claimed
            .iter()
            .map(|(text, printed)| {
                format!(
                    "[[claims]]\nfiles = [\"docs/a.md\"]\ntext = \"{text}\"\nrun = \"{RUN}\"\n\
                     values = [{{ printed = \"{printed}\", key = \"/n\" }}]\n"
                )
            })
            .collect();
        let claims: Claims = if list.is_empty() {
            Claims { claims: Vec::new() }
        } else {
            toml::from_str(&list).unwrap()
        };
        let runs = [RUN.to_owned(), "README.md".to_owned()].into();
        of_document("docs/a.md", document, &runs, &claims)
    }

    #[test]
    fn a_sentence_that_names_a_run_needs_claims_and_its_neighbours_do_not() {
        let text = format!(
            "The agent retries every 5 ms. A start took\n7.6 ms in `{RUN}`. Another takes 9 ms."
        );
        let missing = found(&text, &[]);
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert!(missing[0].starts_with("docs/a.md: 7.6 in"), "{missing:?}");
        assert!(found(&text, &[("7.6 ms", "7.6")]).is_empty());
        let code = format!("```\n7.6 ms `{RUN}`\n```\n");
        assert!(found(&code, &[]).is_empty());
    }

    #[test]
    fn rows_of_the_same_run_need_claims() {
        let text = format!(
            "| a | 7.6 ms | `{RUN}` |\n| b | 3 MB | the same |\n| c | 4 ms | `single.toml` |\n| d | 5 ms | the same |\n"
        );
        let missing = found(&text, &[("7.6 ms", "7.6")]);
        assert_eq!(missing.len(), 1, "{missing:?}");
        assert!(missing[0].contains(": 3 in"), "{missing:?}");
    }
}
