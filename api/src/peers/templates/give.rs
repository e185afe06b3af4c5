//! What other nodes ask about the templates of this one.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use cluster::NodeId;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    builds::{
        owner::{Builds, Requested},
        record::{Home, TemplateRecord},
        run::{Described, Executor},
    },
    hex::hex,
    peers::{
        Peers,
        transfer::{Offered, Offers},
    },
};

/// Names of the files of a build.
pub(super) const ROOT: &str = "root";
pub(super) const LAYER: &str = "layer";
/// Most templates of a node. Servers have at most as many.
const MOST: usize = 10_000;
/// How long an offer waits for its next chunk, and most of them. An offer has its files open.
const IDLE: Duration = Duration::from_secs(1800);
const MOST_KEPT: usize = 32;

/// The templates of a node: builds with tags, and the homes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub(crate) struct Shelf {
    /// By id.
    pub(super) templates: BTreeMap<String, Listed>,
    pub(super) deleted: BTreeMap<String, u64>,
}

/// A template of a node.
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
    /// Equal for equal shelves.
    pub(super) fn sum(&self) -> String {
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        hex(&Sha256::digest(bytes))
    }
}

/// Body of `POST /cluster/templates`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Asked {
    /// Sum of the shelf that the node knows.
    pub(super) known: String,
}

/// The templates of this node. `None`: the asking node knows them.
pub(crate) fn shelf(peers: &Peers, builds: &Builds, asked: &Asked) -> Option<Shelf> {
    let catalog = builds.catalog();
    let all = catalog.templates.values().map(|record| {
        let listed = Listed {
            home: home_of(record, peers.this()),
            record: record.shared(),
        };
        (record.id.clone(), listed)
    });
    let shelf = Shelf {
        templates: all.collect(),
        deleted: peers.templates().deleted().entries().clone(),
    };
    (shelf.sum() != asked.known).then_some(shelf)
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

/// The answer: the files [`ROOT`] and [`LAYER`] under `key`, and what else the node needs.
#[derive(Serialize, Deserialize)]
pub(crate) struct GivenBuild {
    pub(super) key: String,
    pub(super) described: Described,
    /// What the build was started with.
    pub(super) order: Option<String>,
}

/// Offers that this node keeps for a while.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<BTreeMap<String, (Offered, Instant)>>);

impl Kept {
    /// Keeps an offer, which it makes if there is none, from now on for [`IDLE`].
    fn keep(
        &self,
        offers: &Offers,
        key: &str,
        files: impl FnOnce() -> io::Result<Vec<(String, File)>>,
    ) -> io::Result<()> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some((_, used)) = kept.get_mut(key) {
            *used = now;
            return Ok(());
        }
        let offered = offers.offer(key, files()?);
        kept.insert(offered.key().to_owned(), (offered, now));
        if kept.len() > MOST_KEPT
            && let Some(oldest) = kept.iter().min_by_key(|(_, (_, used))| *used)
        {
            let oldest = oldest.0.clone();
            kept.remove(&oldest);
        }
        Ok(())
    }

    /// Ends the offers that were not used for a while.
    pub(super) fn expire(&self) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|_, (_, used)| used.elapsed() < IDLE);
    }
}

/// Offers the files of a build of this node. `None`: it has no such build.
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
    let open = || {
        let files = [(ROOT, &finished.root), (LAYER, &finished.layer)];
        let files = files.map(|(name, path)| Ok((name.to_owned(), File::open(path)?)));
        files.into_iter().collect::<io::Result<_>>()
    };
    let kept = peers.templates().kept().keep(peers.offers(), &key, open);
    kept.map_err(|why| format!("cannot open the files of the template: {why}"))?;
    let build = Requested {
        template_id: wanted.template.clone(),
        build_id: wanted.build.clone(),
    };
    // Without it, the copy cannot be built again from what is kept.
    let order = builds.order(&build).await.ok().flatten();
    let order = order.and_then(|order| String::from_utf8(order.render().ok()?).ok());
    Ok(Some(GivenBuild {
        key,
        described: finished.described,
        order,
    }))
}
