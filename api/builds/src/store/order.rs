//! The order of a build: its start request, kept so that the build can be repeated.
//!
//! An order contains everything except credentials for a registry and the flags that skip the cache. It is stored as
//! the client's request, and checked again when it is read.

use std::io;

use pool::durable::{Durability, read_bounded, replace};
use rest::{BuildStep, StartBuild};
use serde::{Deserialize, Serialize};

use super::{Header, Store};
use crate::{
    plan::{From, Step},
    request::{StartSpec, check_start},
};

const FORMAT: u32 = 1;
/// Suffix of orders.
pub(super) const ORDER: &str = ".order";
/// Maximum size of an order in bytes. A control-plane request has at most a quarter of it.
const MAX_ORDER: u64 = 4 << 20;

/// The start request of an earlier build, without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptOrder {
    pub spec: StartSpec,
    /// The start had credentials.
    pub had_credentials: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Stored {
    format: u32,
    had_credentials: bool,
    start: StartBuild,
}

impl KeptOrder {
    fn of(spec: &StartSpec) -> Self {
        Self {
            had_credentials: spec.credentials.is_some(),
            spec: spec.clone(),
        }
    }

    /// The order in its stored form, which is also sent to other nodes.
    ///
    /// # Errors
    /// Returns an error if it cannot be written as JSON.
    pub fn render(&self) -> io::Result<Vec<u8>> {
        let stored = Stored {
            format: FORMAT,
            had_credentials: self.had_credentials,
            start: request(&self.spec),
        };
        Ok(serde_json::to_vec(&stored)?)
    }

    /// The start as a client would request it.
    #[must_use]
    pub fn request(&self) -> StartBuild {
        request(&self.spec)
    }

    /// # Errors
    /// Returns an error for other formats, and for an order that this server would reject.
    pub fn parse(bytes: &[u8]) -> io::Result<Self> {
        let header: Header = serde_json::from_slice(bytes)?;
        if header.format != FORMAT {
            let why = format!(
                "the order has format {}; this server reads format {FORMAT}",
                header.format
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let stored: Stored = serde_json::from_slice(bytes)?;
        let spec = check_start(stored.start);
        Ok(Self {
            spec: spec.map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?,
            had_credentials: stored.had_credentials,
        })
    }
}

/// The request of a start, without credentials and without flags that skip the cache.
fn request(spec: &StartSpec) -> StartBuild {
    let (from_image, from_template) = match spec.from.clone() {
        From::Image(reference) => (Some(reference), None),
        From::Template(reference) => (None, Some(reference)),
    };
    StartBuild {
        from_image,
        from_template,
        from_image_registry: None,
        force: None,
        steps: Some(spec.steps.iter().map(step).collect()),
        start_cmd: spec.start.clone(),
        ready_cmd: spec.ready.clone(),
        image_config: spec.image_config,
    }
}

fn step(step: &Step) -> BuildStep {
    BuildStep {
        kind: step.kind.name().to_owned(),
        args: Some(step.args.clone()),
        files_hash: step.files.clone(),
        force: None,
    }
}

impl Store {
    /// Stores the order of a build whose template has a record. When it returns, the order survives a crash of the
    /// host.
    ///
    /// # Errors
    /// Returns an error if it cannot be written.
    pub fn write_order(&self, template: &str, build: &str, spec: &StartSpec) -> io::Result<()> {
        self.keep_order(template, build, &KeptOrder::of(spec))
    }

    /// Like [`Store::write_order`], for a build that another node has run.
    ///
    /// # Errors
    /// Returns an error if it cannot be written.
    pub fn keep_order(&self, template: &str, build: &str, order: &KeptOrder) -> io::Result<()> {
        let bytes = order.render()?;
        let name = format!("{build}{ORDER}");
        replace(
            &self.template_dir(template),
            &name,
            &bytes,
            Durability::Host,
        )
    }

    /// The order of a build, or `None` if it was built by an older server.
    ///
    /// # Errors
    /// Returns an error if it cannot be read, or if this server would reject it.
    pub fn read_order(&self, template: &str, build: &str) -> io::Result<Option<KeptOrder>> {
        let path = self.template_dir(template).join(format!("{build}{ORDER}"));
        match read_bounded(&path, MAX_ORDER) {
            Ok(bytes) => KeptOrder::parse(&bytes).map(Some),
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(why) => Err(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use oci_image::registry::Credentials;
    use proptest::prelude::*;
    use rest::ImageConfig;

    use super::*;
    use crate::plan::StepKind;

    fn spec() -> StartSpec {
        let step = |kind, args: &[&str], files: Option<String>| Step {
            kind,
            args: args.iter().map(ToString::to_string).collect(),
            files,
            force: false,
        };
        StartSpec {
            from: From::Image("example.org/private:1".to_owned()),
            credentials: None,
            force: false,
            steps: vec![
                step(StepKind::Run, &["echo \"a\"\nb", "root"], None),
                step(StepKind::Copy, &["a", "b", "", ""], Some("0a".repeat(32))),
                step(StepKind::User, &[], None),
            ],
            start: Some("serve".to_owned()),
            ready: None,
            image_config: Some(ImageConfig::Start),
            owner: None,
        }
    }

    #[test]
    fn an_order_is_read_as_it_was_written_without_credentials_and_force() {
        let mut given = spec();
        given.credentials = Some(Credentials {
            username: "someone".to_owned(),
            password: "hidden".to_owned(),
        });
        given.force = true;
        given.steps[0].force = true;
        let bytes = KeptOrder::of(&given).render().unwrap();
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert!(!text.contains("someone") && !text.contains("hidden"));
        let kept = KeptOrder::parse(&bytes).unwrap();
        assert!(kept.had_credentials);
        assert_eq!(kept.spec, spec());
        let bytes = KeptOrder::of(&spec()).render().unwrap();
        assert!(!KeptOrder::parse(&bytes).unwrap().had_credentials);
        let template = StartSpec {
            from: From::Template("base".to_owned()),
            image_config: None,
            ..spec()
        };
        let bytes = KeptOrder::of(&template).render().unwrap();
        assert_eq!(KeptOrder::parse(&bytes).unwrap().spec, template);
    }

    #[test]
    fn an_order_of_a_later_format_is_refused_before_it_is_decoded() {
        let why = KeptOrder::parse(br#"{"format":2,"start":1}"#).unwrap_err();
        assert!(why.to_string().contains("format 2"), "{why}");
    }

    proptest! {
        #[test]
        fn a_changed_order_is_refused_or_one_that_a_client_could_send(at in 0_usize..600, byte: u8) {
            let mut bytes = KeptOrder::of(&spec()).render().unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(read) = KeptOrder::parse(&bytes) {
                let again = KeptOrder::of(&read.spec).render().unwrap();
                prop_assert_eq!(KeptOrder::parse(&again).unwrap().spec, read.spec);
            }
        }
    }
}
