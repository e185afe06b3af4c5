//! Writes the figures of the runs into the documents and the list.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

use super::{CLAIMS_FILE, Claim, ClaimsError, Figure, load, read, report};

/// Replaces every figure that differs from its run, in its document and in the list, with as many decimals as before.
/// To quote another run, change `run` in the list first. Returns the number of changed figures.
///
/// # Errors
/// Returns [`ClaimsError`] if the list, a document or a run cannot be read or written.
pub fn write(root: &Path) -> Result<usize, ClaimsError> {
    let claims = load(root)?;
    let mut list = read(&root.join(CLAIMS_FILE))?;
    let mut documents: BTreeMap<&str, String> = BTreeMap::new();
    let mut changed = 0;
    for claim in &claims.claims {
        let report = report(&root.join("results").join(&claim.run))?;
        let (text, figures) = renewed(claim, &report);
        if figures.is_empty() {
            continue;
        }
        changed += figures.len();
        for file in &claim.files {
            if !documents.contains_key(file.as_str()) {
                documents.insert(file, read(&root.join(file))?);
            }
            if let Some(document) = documents.get_mut(file.as_str()) {
                *document = document.replace(&claim.text, &text);
            }
        }
        list = in_list(&list, claim, &text, &figures);
    }
    let list = [(CLAIMS_FILE, list)];
    for (file, text) in documents.into_iter().chain(list) {
        let path = root.join(file);
        fs::write(&path, text).map_err(|source| ClaimsError::Read { path, source })?;
    }
    Ok(changed)
}

/// The text of a claim with the figures of its run, and each changed figure with its new form.
fn renewed<'a>(claim: &'a Claim, report: &Value) -> (String, Vec<(&'a Figure, String)>) {
    let (mut text, mut rest) = (String::new(), claim.text.as_str());
    let mut figures = Vec::new();
    for figure in &claim.values {
        let Some(at) = rest.find(&figure.printed) else {
            continue;
        };
        let now = match figure.measured(report) {
            Some(measured) if figure.compare(claim, report).is_some() => {
                format!("{measured:.*}", figure.decimals())
            }
            Some(_) | None => figure.printed.clone(),
        };
        text.push_str(&rest[..at]);
        text.push_str(&now);
        rest = &rest[at + figure.printed.len()..];
        if now != figure.printed {
            figures.push((figure, now));
        }
    }
    text.push_str(rest);
    (text, figures)
}

/// The list with the new text and figures of one claim.
fn in_list(list: &str, claim: &Claim, text: &str, figures: &[(&Figure, String)]) -> String {
    let mut blocks: Vec<String> = list.split("[[claims]]").map(str::to_owned).collect();
    let head = format!("text = {:?}\nrun = {:?}", claim.text, claim.run);
    let files = format!("files = {:?}", claim.files);
    let is_own = |block: &&mut String| block.contains(&head) && block.contains(&files);
    if let Some(block) = blocks.iter_mut().find(is_own) {
        *block = block.replacen(&head, &format!("text = {text:?}\nrun = {:?}", claim.run), 1);
        for (figure, now) in figures {
            let value = |printed: &str| format!("printed = {printed:?}, key = {:?}", figure.key);
            *block = block.replacen(&value(&figure.printed), &value(now), 1);
        }
    }
    blocks.join("[[claims]]")
}
