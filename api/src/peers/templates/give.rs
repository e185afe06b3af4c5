//! Serves requests of other nodes about this node's templates.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use builds::{
    catalog::Catalog,
    owner::{Builds, Requested},
    record::{Home, TemplateRecord},
    run::{Described, Executor},
};
use cluster::NodeId;
use model::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::peers::{
    Peers,
    transfer::{Offered, Offers, Takers},
};
use tasks::blocking;

/// File names of a build.
pub(super) const ROOT: &str = "root";
pub(super) const LAYER: &str = "layer";
/// Maximum number of templates of a node. Servers allow as many.
const MOST: usize = 10_000;
/// Target size of a page of templates in bytes. A response has at most twice as many.
const PAGE: usize = 4 << 20;
/// Idle time after which an offer expires, and the maximum number of offers. An offer keeps its files open.
const IDLE: Duration = Duration::from_secs(1800);
const MOST_KEPT: usize = 32;

/// The templates of a node: builds with tags, and their homes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub(crate) struct Shelf {
    /// Templates by id.
    pub(super) templates: BTreeMap<String, Listed>,
    pub(super) deleted: BTreeMap<String, u64>,
}

/// A listed template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) record: TemplateRecord,
    pub(super) home: Home,
}

#[derive(Serialize, Deserialize)]
struct Written {
    templates: Vec<Listed>,
    deleted: BTreeMap<String, u64>,
}

impl From<Shelf> for Written {
    fn from(shelf: Shelf) -> Self {
        Self {
            templates: shelf.templates.into_values().collect(),
            deleted: shelf.deleted,
        }
    }
}

impl TryFrom<Written> for Shelf {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        if written.templates.len() > MOST || written.deleted.len() > MOST {
            return Err(format!("it has more than {MOST} templates"));
        }
        let mut templates = BTreeMap::new();
        for listed in written.templates {
            if let Some(why) = listed.record.check() {
                return Err(format!("a template is malformed: {why}"));
            }
            templates.insert(listed.record.id.clone(), listed);
        }
        Ok(Self {
            templates,
            deleted: written.deleted,
        })
    }
}

impl Shelf {
    /// Hash of the content. Equal shelves have equal hashes.
    pub(super) fn sum(&self) -> String {
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        hex(&Sha256::digest(bytes))
    }
}

/// Body of `POST /cluster/templates`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// Hash of the shelf that the caller has.
    pub(super) known: String,
    /// Whether the response may be a single page. Older releases treat it as the whole shelf.
    #[serde(default)]
    pub(super) is_paged: bool,
    /// The last template of the previous page.
    #[serde(default)]
    pub(super) after: Option<String>,
}

/// The response: a shelf, or a page of a large one.
#[derive(Serialize, Deserialize)]
pub(crate) struct Page {
    templates: Vec<Listed>,
    deleted: BTreeMap<String, u64>,
    /// Hash of the whole shelf. Empty if an older release sent everything.
    #[serde(default)]
    sum: String,
    #[serde(default)]
    has_more: bool,
}

/// The pages of a shelf received so far.
#[derive(Debug, Default)]
pub(super) struct Pages {
    shelf: Shelf,
    sum: Option<String>,
}

impl Pages {
    /// Adds a page. Returns the next request, or `None` once the shelf is complete.
    ///
    /// # Errors
    /// Returns a message for people if the page does not follow the previous ones, or there are too many.
    pub(super) fn add(&mut self, page: Page) -> Result<Option<Asked>, String> {
        let sum = self.sum.get_or_insert_with(|| page.sum.clone());
        if *sum != page.sum {
            return Err("its templates have changed between two pages".to_owned());
        }
        let before = self.shelf.templates.len();
        let Page {
            templates,
            deleted,
            has_more,
            ..
        } = page;
        let Shelf { templates, deleted } = Written { templates, deleted }.try_into()?;
        let last = self.shelf.templates.keys().next_back();
        if last.is_some_and(|last| templates.keys().next().is_some_and(|first| first <= last)) {
            return Err("its pages are not in order".to_owned());
        }
        self.shelf.templates.extend(templates);
        self.shelf.deleted.extend(deleted);
        let count = self.shelf.templates.len();
        if count > MOST || self.shelf.deleted.len() > MOST {
            return Err(format!("it has more than {MOST} templates"));
        }
        if has_more && count == before {
            return Err("a page is empty".to_owned());
        }
        let last = self.shelf.templates.keys().next_back().cloned();
        Ok(has_more.then_some(Asked {
            known: String::new(),
            is_paged: true,
            after: last,
        }))
    }

    pub(super) fn shelf(self) -> Shelf {
        self.shelf
    }
}

/// This node's templates, or a page of them. `None` if the caller already has them.
///
/// # Errors
/// Returns an error if a template cannot be written as JSON.
pub(crate) async fn shelf(
    peers: &Peers,
    builds: &Builds,
    asked: Asked,
) -> io::Result<Option<Page>> {
    let (peers, catalog) = (peers.clone(), builds.catalog());
    // Hashing thousands of templates takes long.
    blocking(move || page(shelf_of(&peers, &catalog), &asked, PAGE)).await
}

fn shelf_of(peers: &Peers, catalog: &Catalog) -> Shelf {
    let all = catalog.templates.values().map(|record| {
        let listed = Listed {
            home: home_of(record, peers.this()),
            record: record.shared(),
        };
        (record.id.clone(), listed)
    });
    Shelf {
        templates: all.collect(),
        deleted: peers.templates().deleted().entries().clone(),
    }
}

/// `most` is the size of a page in bytes, unless a single template is larger.
fn page(shelf: Shelf, asked: &Asked, most: usize) -> io::Result<Option<Page>> {
    let sum = shelf.sum();
    if sum == asked.known {
        return Ok(None);
    }
    let mut has_more = false;
    let Shelf {
        templates,
        mut deleted,
    } = shelf;
    let (mut listed, mut bytes) = (Vec::new(), 0);
    for (id, template) in templates {
        if asked.after.as_ref().is_some_and(|after| id <= *after) {
            continue;
        }
        bytes += serde_json::to_vec(&template)?.len();
        if asked.is_paged && !listed.is_empty() && bytes > most {
            has_more = true;
            break;
        }
        listed.push(template);
    }
    if asked.after.is_some() {
        deleted.clear();
    }
    Ok(Some(Page {
        templates: listed,
        deleted,
        sum,
        has_more,
    }))
}

pub(super) fn home_of(record: &TemplateRecord, this: &NodeId) -> Home {
    record.home.clone().unwrap_or(Home {
        node: this.clone(),
        epoch: 0,
    })
}

/// Body of `POST /cluster/template/offer`.
#[derive(Serialize, Deserialize)]
pub(crate) struct WantedBuild {
    pub(super) template: String,
    pub(super) build: String,
}

/// The response: the files [`ROOT`] and [`LAYER`] under `key`, and the other data that the copy needs.
#[derive(Serialize, Deserialize)]
pub(crate) struct GivenBuild {
    pub(super) key: String,
    pub(super) described: Described,
    /// The request that started the build.
    pub(super) order: Option<String>,
}

/// Offers that are kept until they have been idle for [`IDLE`].
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<BTreeMap<String, Offered>>);

impl Kept {
    /// Keeps an offer of files until it has been idle for [`IDLE`]. An existing offer under this key is kept instead.
    fn keep(&self, offers: &Offers, key: &str, files: Vec<(String, File)>) {
        let mut kept = self.lock();
        if let Some(offered) = kept.get(key) {
            return offered.renew();
        }
        // Every member copies every template.
        let offered = offers.offer(key, Takers::Members, files);
        kept.insert(offered.key().to_owned(), offered);
        if kept.len() > MOST_KEPT
            && let Some(oldest) = kept.iter().min_by_key(|(_, offered)| offered.used())
        {
            let oldest = oldest.0.clone();
            kept.remove(&oldest);
        }
    }

    /// Renews an offer. Returns whether it exists.
    fn renew(&self, key: &str) -> bool {
        let kept = self.lock();
        let found = kept.get(key);
        found.inspect(|offered| offered.renew()).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Offered>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops offers that have been idle for too long.
    pub(super) fn expire(&self) {
        self.expire_at(Instant::now());
    }

    fn expire_at(&self, now: Instant) {
        let mut kept = self.lock();
        let is_idle = |used: Instant| now.saturating_duration_since(used) >= IDLE;
        kept.retain(|_, offered| offered.used().is_some_and(|used| !is_idle(used)));
    }
}

/// Offers the files of a build of this node. Returns `None` if there is no such build.
///
/// # Errors
/// Returns a message for people.
pub(crate) async fn offer(
    peers: &Peers,
    builds: &Builds,
    executor: &Executor,
    wanted: &WantedBuild,
) -> Result<Option<GivenBuild>, String> {
    let catalog = builds.catalog();
    let record = catalog.templates.get(&wanted.template);
    let Some(template) = record.and_then(|record| record.by_build().remove(&wanted.build)) else {
        return Ok(None);
    };
    let finished = executor.finished(&template).await?;
    let key = format!("template-{template}");
    let kept = peers.templates().kept();
    if !kept.renew(&key) {
        let paths = [(ROOT, finished.root), (LAYER, finished.layer)];
        let open = move || {
            let files = paths.map(|(name, path)| Ok((name.to_owned(), File::open(path)?)));
            files.into_iter().collect::<io::Result<_>>()
        };
        let files = blocking(open).await;
        let files = files.map_err(|why| format!("cannot open the files of the template: {why}"))?;
        kept.keep(peers.offers(), &key, files);
    }
    let build = Requested {
        template_id: wanted.template.clone(),
        build_id: wanted.build.clone(),
    };
    // Without it, the copy cannot be rebuilt from its parts.
    let order = builds.order(&build).await.ok().flatten();
    let order = order.and_then(|order| String::from_utf8(order.render().ok()?).ok());
    Ok(Some(GivenBuild {
        key,
        described: finished.described,
        order,
    }))
}

#[cfg(test)]
mod tests {
    use model::Bytes;

    use super::*;
    use crate::peers::transfer::TransferLimits;

    fn shelf(count: usize) -> Shelf {
        let listed = |at: usize| {
            let id = format!("{at:020}");
            let record = TemplateRecord {
                id: id.clone(),
                name: "name".to_owned(),
                created_unix_ms: 1,
                public: false,
                builds: Vec::new(),
                tags: BTreeMap::new(),
                home: None,
            };
            let home = Home {
                node: "a".parse().unwrap(),
                epoch: 0,
            };
            (id, Listed { record, home })
        };
        Shelf {
            templates: (0..count).map(listed).collect(),
            deleted: BTreeMap::from([("gone".to_owned(), 7)]),
        }
    }

    #[test]
    fn a_large_shelf_arrives_in_pages_and_a_small_one_in_one() {
        let one = shelf(1).templates.into_values().next().unwrap();
        let one = serde_json::to_vec(&one).unwrap().len();
        for (count, most, expected) in [(0, one, 1), (3, 3 * one, 1), (10, 3 * one, 4), (3, 1, 3)] {
            let shelf = shelf(count);
            let (mut pages, mut count) = (Pages::default(), 0);
            let mut asked = Asked {
                is_paged: true,
                ..Asked::default()
            };
            loop {
                let page = page(shelf.clone(), &asked, most).unwrap().unwrap();
                count += 1;
                match pages.add(page).unwrap() {
                    Some(next) => asked = next,
                    None => break,
                }
            }
            assert_eq!(count, expected);
            let known = Asked {
                known: shelf.sum(),
                ..Asked::default()
            };
            assert!(page(shelf.clone(), &known, most).unwrap().is_none());
            assert_eq!(pages.shelf(), shelf);
        }
        // An older release gets everything in one response.
        let all = page(shelf(10), &Asked::default(), one).unwrap().unwrap();
        assert!(!all.has_more && all.templates.len() == 10);
    }

    #[tokio::test]
    async fn an_offer_is_kept_as_long_as_its_chunks_are_asked_for() {
        let offers = Offers::new(TransferLimits {
            rate: Bytes::mib(64),
            disk_reserve: Bytes(0),
        });
        let (kept, dir) = (Kept::default(), tempfile::tempdir().unwrap());
        let path = dir.path().join("layer");
        std::fs::write(&path, "x").unwrap();
        let files = vec![(LAYER.to_owned(), File::open(&path).unwrap())];
        let by: NodeId = "b".parse().unwrap();
        kept.keep(&offers, "k", files);
        let made = Instant::now();
        assert!(offers.chunk("k", &by, LAYER, 0).await.unwrap().is_some());
        kept.expire_at(made + IDLE);
        assert!(offers.chunk("k", &by, LAYER, 0).await.unwrap().is_some());
        kept.expire_at(Instant::now() + IDLE);
        assert!(offers.chunk("k", &by, LAYER, 0).await.unwrap().is_none());
    }

    #[test]
    fn pages_that_do_not_follow_each_other_are_refused() {
        let of = |ids: &[usize], sum: &str| {
            let mut whole = shelf(9);
            whole
                .templates
                .retain(|id, _| ids.iter().any(|at| *id == format!("{at:020}")));
            Page {
                templates: whole.templates.into_values().collect(),
                deleted: BTreeMap::new(),
                sum: sum.to_owned(),
                has_more: true,
            }
        };
        for (second, why) in [
            (of(&[3], "other"), "changed"),
            (of(&[1, 2], "sum"), "order"),
            (of(&[], "sum"), "empty"),
        ] {
            let mut pages = Pages::default();
            pages.add(of(&[0, 1], "sum")).unwrap().unwrap();
            let refused = pages.add(second).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
