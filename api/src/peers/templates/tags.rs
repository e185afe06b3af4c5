//! Publishes the builds that the tags of this node's templates refer to. The other nodes see a change before clients
//! do.
//!
//! ```text
//! change ─► etcd ─► the view of this node ─► POST /cluster/template/tags: in your view? ─► clients see it
//! ```
//! From then on no node uses the previous build: each create compares its node's copy with the view
//! ([`cluster::View::is_outdated`]). If etcd or a node does not respond, the change is delayed only briefly, and a node
//! may use an outdated copy until it has polled this one.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use cluster::{NodeId, Tags, TemplateId};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::{
    super::{PeerError, Peers, question},
    give::home_of,
    lock,
};
use builds::{owner::Builds, record::TemplateRecord};

/// How long a change of this node may take to appear in a view.
const SEEN: Duration = Duration::from_secs(1);
/// How long to wait for another node's response.
const ANSWERED: Duration = Duration::from_secs(2);
/// Maximum number of deleted templates whose tags stay published, so that no copy is used until its node has removed
/// it.
const MOST_DELETED: usize = 100;

/// Body of `POST /cluster/template/tags`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Announced {
    template: TemplateId,
    tags: Tags,
}

/// The builds that the tags of a template refer to. `None` if the template's home is another node.
fn tags_of(record: &TemplateRecord, this: &NodeId) -> Option<Tags> {
    let home = home_of(record, this);
    let named = record.tags.iter();
    let builds: BTreeMap<_, _> = named
        .map(|(tag, named)| (tag.clone(), named.build.clone()))
        .collect();
    (home.node == *this).then_some(Tags {
        epoch: home.epoch,
        builds,
    })
}

impl Peers {
    /// Publishes the tags of a template after a change. `None`: the template is no longer on this node. If the tags
    /// have changed, returns when the other nodes have seen them, or after [`SEEN`] and [`ANSWERED`].
    pub(crate) async fn announce(&self, before: &TemplateRecord, after: Option<&TemplateRecord>) {
        let Ok(template) = before.id.parse::<TemplateId>() else {
            return;
        };
        let templates = self.templates();
        if templates.deleted().has(&before.id) {
            // The deletion stays published if it was made here.
            if !lock(&templates.0.deleted_here).contains(&template) {
                self.cluster().publish_tags(template, None);
            }
            return;
        }
        let tags = after.and_then(|after| tags_of(after, self.this()));
        self.cluster().publish_tags(template.clone(), tags.as_ref());
        if let Some(tags) = tags
            && tags_of(before, self.this()).as_ref() != Some(&tags)
        {
            self.until_seen(Announced { template, tags }).await;
        }
    }

    /// Publishes that a template is deleted, like [`Self::announce`].
    pub(crate) async fn announce_deletion(&self, id: &str) {
        let Ok(template) = id.parse::<TemplateId>() else {
            return;
        };
        let tags = Tags::deleted();
        let oldest = {
            let mut deleted = lock(&self.templates().0.deleted_here);
            deleted.push_back(template.clone());
            (deleted.len() > MOST_DELETED).then(|| deleted.pop_front())
        };
        if let Some(oldest) = oldest.flatten() {
            self.cluster().publish_tags(oldest, None);
        }
        self.cluster().publish_tags(template.clone(), Some(&tags));
        self.until_seen(Announced { template, tags }).await;
    }

    async fn until_seen(&self, announced: Announced) {
        let template = announced.template.as_str();
        let is_seen = self.cluster().may_act_as_owner() && self.sees(self.this(), &announced).await;
        if !is_seen {
            tracing::warn!(
                template,
                "etcd does not confirm a change of tags: the other nodes may use previous builds until they have polled this one"
            );
            return;
        }
        let Ok(body) = serde_json::to_vec(&announced) else {
            return;
        };
        let ask = |peers: Self, node| {
            let body = body.clone();
            async move { peers.ask_whether_seen(&node, body).await }
        };
        for (node, why) in self.unconfirmed(ask).await {
            tracing::warn!(
                template, %node, why,
                "another node has not confirmed a change of tags: it may use previous builds of the template for some seconds"
            );
        }
    }

    async fn ask_whether_seen(&self, node: &NodeId, body: Vec<u8>) -> Result<(), String> {
        let question = question("POST", "/cluster/template/tags", body);
        let answer: Result<Result<bool, PeerError>, _> =
            timeout(ANSWERED, self.ask(node, question)).await;
        match answer {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err("its view does not have the change".to_owned()),
            Ok(Err(why)) => Err(model::chain(&why)),
            Err(_) => Err("it did not respond in time".to_owned()),
        }
    }

    /// Whether this node's view has the tags that `node` announced, now or within a short wait.
    pub(crate) async fn sees(&self, node: &NodeId, announced: &Announced) -> bool {
        let mut views = self.cluster().views();
        let seen = views.wait_for(|view| {
            let of_template = view.tags.get(&announced.template);
            of_template.and_then(|nodes| nodes.get(node)) == Some(&announced.tags)
        });
        timeout(SEEN, seen).await.is_ok_and(|seen| seen.is_ok())
    }
}

impl Peers {
    /// Whether this node has a copy of a build that is not current.
    pub(super) fn is_behind(&self, builds: &Builds) -> bool {
        let catalog = builds.catalog();
        let copies = catalog.templates.values().filter(|t| t.home.is_some());
        let mut named = copies.flat_map(|t| t.tags.keys().filter_map(|tag| t.named(tag)));
        named.any(|tagged| self.is_outdated(&tagged))
    }

    /// Returns when this node is behind.
    pub(super) async fn until_behind(&self, builds: &Builds) {
        let mut views = self.cluster().views();
        let mut known = None;
        loop {
            let tags = Arc::clone(&views.borrow_and_update().tags);
            let is_new = known.is_none_or(|known| !Arc::ptr_eq(&known, &tags));
            if is_new && self.is_behind(builds) {
                return;
            }
            known = Some(tags);
            if views.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// Tags of deleted templates that this node has published, oldest first.
pub(super) type DeletedHere = VecDeque<TemplateId>;

#[cfg(test)]
mod tests {
    use super::*;
    use builds::record::{Home, TagRecord};

    #[test]
    fn only_the_home_names_builds() {
        let (a, b): (NodeId, NodeId) = ("a".parse().unwrap(), "b".parse().unwrap());
        let mut record = TemplateRecord::new("t".to_owned(), "n".to_owned(), 1);
        let named = TagRecord {
            build: "x".to_owned(),
            assigned_unix_ms: 1,
        };
        record.tags.insert("v1".to_owned(), named);
        let builds = BTreeMap::from([("v1".to_owned(), "x".to_owned())]);
        let own = tags_of(&record, &a).unwrap();
        assert_eq!((own.epoch, &own.builds), (0, &builds));
        // Happens after another node has taken the template over.
        let (node, epoch) = (b.clone(), 1);
        record.home = Some(Home { node, epoch });
        assert_eq!(tags_of(&record, &a), None);
        assert_eq!(tags_of(&record, &b), Some(Tags { epoch, builds }));
    }
}
