//! Publishes this node's load and templates, and applies its status and certificate from the cluster.

use std::{collections::BTreeMap, time::Duration};

use builds::owner::Builds;
use cluster::{Load, NodeState, Replica, Tagged, TemplateId};
use pool::{Pool, PoolStats, TemplateInfo};

use super::{
    PeerError, Peers,
    authority::RENEW_AFTER,
    join::{NodeKey, Signed},
    question, status_of,
    tls::OWN,
};
use crate::node::OwnNode;

/// Polling interval of load and templates. The cluster writes the load at most once a second, and only if it has
/// changed.
const EVERY: Duration = Duration::from_secs(1);
/// How often the age of the certificate is checked.
const RENEWAL: Duration = Duration::from_secs(3600);
const MIB: u64 = 1 << 20;
/// Free memory is published in steps of this size, so that small changes cause no writes to etcd.
const STEP_MIB: u64 = 64;

/// Publishes load and templates; never returns.
pub(crate) async fn publish(peers: Peers, pool: Pool, builds: Builds, node: OwnNode) {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let cpus = u32::try_from(cpus).unwrap_or(u32::MAX);
    let mut published: BTreeMap<TemplateId, Replica> = BTreeMap::new();
    loop {
        let templates = pool.templates().await;
        let names = Names::of(&templates, &builds, &peers);
        let stats = pool.stats().await;
        let (_, _, creating) = node.creates();
        peers
            .cluster()
            .publish_load(load(&stats, &names, creating, cpus));
        let replicas = names.replicas();
        for (name, replica) in &replicas {
            if published.get(name) != Some(replica) {
                peers.cluster().add_replica(name.clone(), replica.clone());
            }
        }
        for name in published
            .keys()
            .filter(|name| !replicas.contains_key(*name))
        {
            peers.cluster().remove_replica(name);
        }
        published = replicas;
        tokio::time::sleep(EVERY).await;
    }
}

fn load(stats: &PoolStats, names: &Names, creating: u32, cpus: u32) -> Load {
    let mut warm = BTreeMap::new();
    for (stock, figures) in stats.stocks.iter().filter(|(_, stock)| stock.warm > 0) {
        for name in names.of_stock(stock) {
            warm.insert(name.clone(), figures.warm);
        }
    }
    Load {
        memory_free_mib: stats.available_bytes / MIB / STEP_MIB * STEP_MIB,
        warm,
        running: stats.running,
        paused: stats.paused,
        creating,
        cpus,
    }
}

/// The names by which creates may request each template, and the tags of builds that they refer to.
struct Names(Vec<(TemplateInfo, BTreeMap<TemplateId, Option<Tagged>>)>);

impl Names {
    fn of(templates: &[TemplateInfo], builds: &Builds, peers: &Peers) -> Self {
        let catalog = builds.catalog();
        let named = templates.iter().map(|template| {
            let client_id = catalog.id_for_clients(&template.id);
            let is_shadowed = peers.templates().is_shadowed(client_id);
            let own = template.names.iter().filter(|_| !is_shadowed);
            let tagged = |name: &str| {
                let (tagged, pool_id) = catalog.tagged(name)?;
                (pool_id == template.id).then_some(tagged)
            };
            let own = own.map(|name| (name.as_str(), tagged(name)));
            let by_pool = (template.id.as_str(), None);
            // The id that clients use stands for the default tag, if there is one.
            let by_id = match catalog.tagged(client_id) {
                Some((tagged, pool_id)) if pool_id == template.id => {
                    Some((client_id, Some(tagged)))
                }
                Some(_) => None,
                None => Some((client_id, None)),
            };
            let all = own.chain([by_pool]).chain(by_id);
            let names = all.filter_map(|(name, tagged)| Some((published_name(name)?, tagged)));
            (template.clone(), names.collect())
        });
        Self(named.collect())
    }

    /// The first name, or else the id, of the template whose stock has this key.
    fn of_stock(&self, stock: &str) -> impl Iterator<Item = &TemplateId> {
        let mut all = self.0.iter();
        let found = all.find(|(template, _)| {
            template.id == stock || template.names.iter().any(|name| name == stock)
        });
        found.into_iter().flat_map(|(_, names)| names.keys())
    }

    fn replicas(&self) -> BTreeMap<TemplateId, Replica> {
        let all = self.0.iter().flat_map(|(template, names)| {
            names.iter().map(|(name, tagged)| {
                let replica = Replica {
                    content: template.id.clone(),
                    bytes: template.bytes.0,
                    tagged: tagged.clone(),
                };
                (name.clone(), replica)
            })
        });
        all.collect()
    }
}

/// Applies the status that the cluster sets for this node; never returns.
pub(crate) async fn follow_status(peers: Peers, node: OwnNode) {
    let mut views = peers.cluster().views();
    let mut known: Option<NodeState> = None;
    loop {
        let state = views.borrow_and_update().state(peers.this());
        if known != Some(state) {
            known = Some(state);
            let node = node.clone();
            let set = tasks::on_thread(move || node.set(status_of(state))).await;
            if let Ok(Err(why)) = set {
                tracing::error!(why = %model::chain(&why), "cannot store this node's status");
            }
        }
        if views.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Renews the certificate of this node before it expires; never returns.
pub(crate) async fn renew(peers: Peers) {
    loop {
        let modified = std::fs::metadata(peers.dir().path(OWN)).and_then(|file| file.modified());
        let age = modified.ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > RENEW_AFTER) {
            renew_now(&peers).await;
        }
        tokio::time::sleep(RENEWAL).await;
    }
}

async fn renew_now(peers: &Peers) {
    let done = match renewed(peers).await {
        Ok(()) => peers
            .tls()
            .reload(peers.dir())
            .map_err(|why| model::chain(&why)),
        Err(why) => Err(why),
    };
    match done {
        Ok(()) => tracing::info!("renewed the certificate of this node"),
        Err(why) => tracing::error!(
            why,
            "cannot renew the certificate of this node: the node that founded the cluster must respond before it expires"
        ),
    }
}

async fn renewed(peers: &Peers) -> Result<(), String> {
    let text = |why: &dyn std::error::Error| model::chain(why);
    let key = NodeKey::load(peers.dir()).map_err(|why| text(&why))?;
    let asked = key.renewal();
    if let Ok(authority) = peers.authority() {
        let view = peers.cluster().view();
        let member = view.members.get(peers.this());
        let member = member.ok_or("this node is not in the cluster's view")?;
        let signed = super::join::sign_renewal(&authority, peers.dir(), member, &asked);
        let signed = signed.map_err(|why| text(&why))?;
        return key.keep(peers.dir(), &signed).map_err(|why| text(&why));
    }
    let body = serde_json::to_vec(&asked).map_err(|why| text(&why))?;
    let mut last = "no other node is reachable".to_owned();
    for node in peers.others() {
        let question = question("POST", "/cluster/renew", body.clone());
        let signed: Result<Signed, PeerError> = peers.ask(&node, question).await;
        match signed {
            Ok(signed) => return key.keep(peers.dir(), &signed).map_err(|why| text(&why)),
            Err(why) => last = text(&why),
        }
    }
    Err(last)
}

/// The name under which nodes publish a template: without the default tag.
pub(crate) fn published_name(reference: &str) -> Option<TemplateId> {
    let name = reference.strip_suffix(":default").unwrap_or(reference);
    name.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_tag_names_the_template_itself() {
        assert_eq!(published_name("a:default"), published_name("a"));
        assert_ne!(published_name("a:x"), published_name("a"));
        assert_eq!(published_name("a/b"), None);
    }
}
