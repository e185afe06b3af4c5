//! Builds in the form that readers see: a copy that the owner replaces after each change.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use cluster::Tagged;

use super::{log::BuildLog, record::TemplateRecord, request::DEFAULT_TAG};

/// All built templates, and the logs in memory.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    pub templates: BTreeMap<String, Arc<TemplateRecord>>,
    /// By build id. Logs of builds that ended long ago are on disk only.
    pub logs: HashMap<String, BuildLog>,
    /// Template ids by the builds' ids in the pool.
    pub by_pool: HashMap<String, String>,
}

type Templates = BTreeMap<String, Arc<TemplateRecord>>;

fn find<'a>(templates: &'a Templates, word: &str) -> Option<&'a Arc<TemplateRecord>> {
    let named = || templates.values().find(|t| t.name == word);
    templates.get(word).or_else(named)
}

/// A reference without a tag means the default tag.
fn split(reference: &str) -> (&str, &str) {
    reference
        .split_once(':')
        .unwrap_or((reference, DEFAULT_TAG))
}

/// Resolves an id or a name, with or without a tag.
pub(super) fn resolve(templates: &Templates, reference: &str) -> Resolved {
    let (word, tag) = split(reference);
    match find(templates, word) {
        None => Resolved::Foreign,
        Some(template) => match template.tagged(tag) {
            Some((_, pool_id)) => Resolved::Ready(pool_id.to_owned()),
            None => Resolved::NotReady,
        },
    }
}

/// Like [`Catalog::tagged`].
pub(super) fn tagged<'a>(templates: &'a Templates, reference: &str) -> Option<(Tagged, &'a str)> {
    let (word, tag) = split(reference);
    let template = find(templates, word)?;
    let (_, pool_id) = template.tagged(tag)?;
    Some((template.named(tag)?, pool_id))
}

/// The result of resolving a reference in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// Not a built template. The pool may have one.
    Foreign,
    /// The id in the pool of a ready build.
    Ready(String),
    /// A built template without a ready build for the tag.
    NotReady,
}

impl Catalog {
    /// Finds a template by id or name, which must not contain a tag.
    #[must_use]
    pub fn find(&self, word: &str) -> Option<&Arc<TemplateRecord>> {
        find(&self.templates, word)
    }

    /// Like [`Catalog::find`], with or without a tag, which is ignored.
    #[must_use]
    pub fn find_untagged(&self, reference: &str) -> Option<&Arc<TemplateRecord>> {
        self.find(split(reference).0)
    }

    /// Resolves an id or a name, with or without a tag.
    #[must_use]
    pub fn resolve(&self, reference: &str) -> Resolved {
        resolve(&self.templates, reference)
    }

    /// The ready build that an id or a name, with or without a tag, refers to, and its template in the pool.
    pub fn tagged(&self, reference: &str) -> Option<(Tagged, &str)> {
        tagged(&self.templates, reference)
    }

    /// The client-visible id of a template in the pool.
    #[must_use]
    pub fn id_for_clients<'a>(&'a self, pool_id: &'a str) -> &'a str {
        self.by_pool.get(pool_id).map_or(pool_id, String::as_str)
    }
}
