//! Checks of build requests. Pure: nothing here depends on the server's state.

use std::collections::BTreeSet;

use model::{Bytes, MAX_MEMORY, MIN_MEMORY, is_sha256};
use oci_image::registry::Credentials;
use rest::{BuildStep, ImageConfig, ImageRegistry, NewBuild, StartBuild};

use super::{
    plan::{From, Step, StepKind},
    text::plain,
};

/// Maximum length of a name and of a tag, in bytes.
const MAX_NAME: usize = 128;
const MAX_TAGS: usize = 32;
/// The tag of a name that has none.
pub const DEFAULT_TAG: &str = "default";
const MAX_STEPS: usize = 1000;
/// Length to which image references, template references and hashes are cut in messages.
const SHOWN: usize = 200;
const MIB: u64 = 1 << 20;
/// Guest RAM is a multiple of this.
const MEMORY_UNIT: u64 = 2 * MIB;
/// Used if the request has no size.
const DEFAULT_MEMORY: Bytes = Bytes::mib(1024);
const MAX_VCPUS: i64 = 32;
const MAX_FREE_DISK: Bytes = Bytes::mib(64 << 10);

/// A request that every server would reject.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error("{0}")]
    Invalid(String),
    /// A part of E2B's API that this server does not support.
    #[error("{0}")]
    Unsupported(String),
}

/// A checked request for a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBuildSpec {
    /// Without a tag.
    pub name: String,
    /// At least one, without duplicates.
    pub tags: BTreeSet<String>,
    /// Rounded up to a size that a VM can have.
    pub memory: Bytes,
    pub vcpus: u8,
    /// Minimum free disk space of sandboxes.
    pub min_free_disk: Bytes,
}

/// A checked start of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartSpec {
    pub from: From,
    pub credentials: Option<Credentials>,
    pub force: bool,
    pub steps: Vec<Step>,
    pub start: Option<String>,
    pub ready: Option<String>,
    /// Only with an image.
    pub image_config: Option<ImageConfig>,
    /// Identifies the API key of the request. Not stored.
    pub owner: Option<String>,
}

fn invalid(why: impl Into<String>) -> RequestError {
    RequestError::Invalid(why.into())
}

/// # Errors
/// Returns [`RequestError::Invalid`] for a malformed name or tag, and for sizes that no VM can have.
pub fn check_new(request: NewBuild) -> Result<NewBuildSpec, RequestError> {
    let given = [request.name, request.alias];
    let given = given.into_iter().flatten().find(|name| !name.is_empty());
    let given = given.ok_or_else(|| invalid("name is missing: name the template"))?;
    let (name, tag) = split(&given)?;
    let mut tags = BTreeSet::new();
    tags.extend(tag.map(str::to_owned));
    for tag in request.tags.unwrap_or_default() {
        tags.insert(check_word("tag", &tag)?.to_owned());
    }
    if tags.len() > MAX_TAGS {
        let count = tags.len();
        return Err(invalid(format!("{count} tags: use at most {MAX_TAGS}")));
    }
    if tags.is_empty() {
        tags.insert(DEFAULT_TAG.to_owned());
    }
    check_lengths(name, &tags)?;
    Ok(NewBuildSpec {
        name: name.to_owned(),
        tags,
        memory: memory(request.memory_mb)?,
        vcpus: vcpus(request.cpu_count)?,
        min_free_disk: min_free_disk(request.min_free_disk_mb)?,
    })
}

/// Splits `name` or `name:tag`, and checks both.
///
/// # Errors
/// Returns [`RequestError::Invalid`].
pub fn split(given: &str) -> Result<(&str, Option<&str>), RequestError> {
    match given.split_once(':') {
        Some((name, tag)) => Ok((check_word("name", name)?, Some(check_word("tag", tag)?))),
        None => Ok((check_word("name", given)?, None)),
    }
}

/// Checks the tags of a request to assign or remove tags.
///
/// # Errors
/// Returns [`RequestError::Invalid`] for no tags, too many, or malformed ones.
pub fn check_tags(name: &str, given: Vec<String>) -> Result<BTreeSet<String>, RequestError> {
    if given.is_empty() || given.len() > MAX_TAGS {
        let count = given.len();
        return Err(invalid(format!("{count} tags: use 1 to {MAX_TAGS}")));
    }
    let words = given.iter().map(|tag| check_word("tag", tag));
    let tags = words
        .map(|word| word.map(str::to_owned))
        .collect::<Result<_, _>>()?;
    check_lengths(name, &tags)?;
    Ok(tags)
}

/// The limit applies to the pool's names, which contain the tag.
fn check_lengths(name: &str, tags: &BTreeSet<String>) -> Result<(), RequestError> {
    let too_long = tags
        .iter()
        .find(|tag| name.len() + 1 + tag.len() > MAX_NAME);
    too_long.map_or(Ok(()), |tag| {
        Err(invalid(format!(
            "\"{name}:{tag}\" is too long: name and tag may have {MAX_NAME} bytes together, the colon included"
        )))
    })
}

/// A name or a tag: letters, digits and `._-`, in names also `/`.
fn check_word<'a>(what: &str, word: &'a str) -> Result<&'a str, RequestError> {
    let is_good =
        |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b) || (what == "name" && b == b'/');
    let starts_well = word
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric());
    if starts_well && word.len() <= MAX_NAME && word.bytes().all(is_good) {
        return Ok(word);
    }
    Err(invalid(format!(
        "{:?} is not a {what} of a template: use letters, digits and ._-, beginning with a letter or digit, at most \
         {MAX_NAME} bytes",
        plain(word, MAX_NAME)
    )))
}

fn memory(mb: Option<i64>) -> Result<Bytes, RequestError> {
    let Some(mb) = mb else {
        return Ok(DEFAULT_MEMORY);
    };
    let bytes = u64::try_from(mb).ok().and_then(|mb| mb.checked_mul(MIB));
    let rounded = bytes.and_then(|bytes| bytes.checked_next_multiple_of(MEMORY_UNIT));
    let fits = rounded.filter(|bytes| (MIN_MEMORY.0..=MAX_MEMORY.0).contains(bytes));
    fits.map(Bytes).ok_or_else(|| {
        let (least, most) = (MIN_MEMORY.0 / MIB, MAX_MEMORY.0 / MIB);
        invalid(format!("memoryMB is {mb}: use {least} to {most}"))
    })
}

fn vcpus(count: Option<i64>) -> Result<u8, RequestError> {
    let count = count.unwrap_or(1);
    let fits = (1..=MAX_VCPUS).contains(&count);
    let number = u8::try_from(count).ok().filter(|_| fits);
    number.ok_or_else(|| invalid(format!("cpuCount is {count}: use 1 to {MAX_VCPUS}")))
}

fn min_free_disk(mb: Option<i64>) -> Result<Bytes, RequestError> {
    let mb = mb.unwrap_or(0);
    let bytes = u64::try_from(mb).ok().and_then(|mb| mb.checked_mul(MIB));
    let fits = bytes.filter(|bytes| *bytes <= MAX_FREE_DISK.0);
    fits.map(Bytes).ok_or_else(|| {
        let most = MAX_FREE_DISK.0 / MIB;
        invalid(format!("minFreeDiskMb is {mb}: use 0 to {most}"))
    })
}

/// Checks that sandboxes can use the requested free disk space. `limit` is the maximum that each may write.
///
/// # Errors
/// Returns [`RequestError::Invalid`] if the limit is smaller.
pub fn check_disk_limit(min_free_disk: Bytes, limit: Option<Bytes>) -> Result<(), RequestError> {
    let Some(limit) = limit.filter(|limit| *limit < min_free_disk) else {
        return Ok(());
    };
    let (asked, most) = (min_free_disk.0 / MIB, limit.0 / MIB);
    Err(invalid(format!(
        "minFreeDiskMb is {asked}, but a sandbox of this server may write at most {most} MiB to its disk (sandbox.disk): \
         ask for less, or let the operator raise the limit"
    )))
}

/// # Errors
/// Returns [`RequestError::Invalid`] for a malformed request, and [`RequestError::Unsupported`] for AWS credentials.
pub fn check_start(request: StartBuild) -> Result<StartSpec, RequestError> {
    let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
    let from = match (filled(request.from_image), filled(request.from_template)) {
        (Some(image), None) => From::Image(no_nul("fromImage", image)?),
        (None, Some(template)) => From::Template(no_nul("fromTemplate", template)?),
        (None, None) => {
            return Err(invalid(
                "fromImage and fromTemplate are both missing: set one",
            ));
        }
        (Some(_), Some(_)) => {
            return Err(invalid("fromImage and fromTemplate are both set: use one"));
        }
    };
    if request.image_config.is_some() && matches!(from, From::Template(_)) {
        return Err(invalid("imageConfig is for fromImage only"));
    }
    let steps = request.steps.unwrap_or_default();
    if steps.len() > MAX_STEPS {
        let count = steps.len();
        return Err(invalid(format!("{count} steps: use at most {MAX_STEPS}")));
    }
    let steps = steps.into_iter().zip(1..);
    let steps = steps.map(|(given, number)| step(given, number));
    let command = |what, text| filled(text).map(|text| no_nul(what, text)).transpose();
    Ok(StartSpec {
        from,
        credentials: request.from_image_registry.map(credentials).transpose()?,
        force: request.force.unwrap_or(false),
        steps: steps.collect::<Result<_, _>>()?,
        start: command("startCmd", request.start_cmd)?,
        ready: command("readyCmd", request.ready_cmd)?,
        image_config: request.image_config,
        owner: None,
    })
}

fn step(given: BuildStep, number: usize) -> Result<Step, RequestError> {
    let kind = StepKind::parse(&given.kind).ok_or_else(|| {
        let kind = plain(&given.kind, SHOWN);
        invalid(format!(
            "step {number} has the type {kind:?}: use RUN, COPY, ENV, ARG, WORKDIR or USER"
        ))
    })?;
    let args = given.args.unwrap_or_default().into_iter();
    let args = args.map(|arg| no_nul(&format!("an argument of step {number}"), arg));
    let files = given.files_hash.filter(|hash| !hash.is_empty());
    Ok(Step {
        kind,
        args: args.collect::<Result<_, _>>()?,
        files: files.map(check_hash).transpose()?,
        force: given.force.unwrap_or(false),
    })
}

/// Checks a hash of files: 64 lower-case hex digits, which are safe in a file name.
///
/// # Errors
/// Returns [`RequestError::Invalid`].
pub fn check_hash(hash: String) -> Result<String, RequestError> {
    if is_sha256(&hash) {
        return Ok(hash);
    }
    Err(invalid(format!(
        "{:?} is not a hash of files: use 64 lower-case hex digits",
        plain(&hash, SHOWN)
    )))
}

/// Rejects NUL bytes, which no command line or path can contain.
fn no_nul(what: &str, text: String) -> Result<String, RequestError> {
    if text.contains('\0') {
        return Err(invalid(format!("{what} contains a NUL byte")));
    }
    Ok(text)
}

/// User and password for a registry.
///
/// # Errors
/// Returns [`RequestError::Unsupported`] for AWS credentials.
pub fn credentials(registry: ImageRegistry) -> Result<Credentials, RequestError> {
    match registry {
        ImageRegistry::Registry { username, password } => Ok(Credentials { username, password }),
        // Google's registries accept a service account's key as the password of this user.
        ImageRegistry::Gcp {
            service_account_json,
        } => Ok(Credentials {
            username: "_json_key".to_owned(),
            password: service_account_json,
        }),
        ImageRegistry::Aws { .. } => Err(RequestError::Unsupported(
            "fromImageRegistry of type aws: get a password with `aws ecr get-login-password`, and send it with the \
             type registry and the username AWS"
                .to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn named(name: &str) -> NewBuild {
        NewBuild {
            name: Some(name.to_owned()),
            ..NewBuild::default()
        }
    }

    fn from_image() -> StartBuild {
        StartBuild {
            from_image: Some("debian".to_owned()),
            ..StartBuild::default()
        }
    }

    #[test]
    fn the_config_of_an_image_needs_an_image() {
        let request = |from_template: bool| StartBuild {
            from_image: (!from_template).then(|| "debian".to_owned()),
            from_template: from_template.then(|| "base".to_owned()),
            image_config: Some(ImageConfig::Start),
            ..StartBuild::default()
        };
        let spec = check_start(request(false)).unwrap();
        assert_eq!(spec.image_config, Some(ImageConfig::Start));
        let why = check_start(request(true)).unwrap_err();
        assert!(why.to_string().contains("imageConfig"), "{why}");
        let read = |text| serde_json::from_str::<StartBuild>(text);
        let read = read(r#"{"fromImage":"a","imageConfig":"defaults"}"#).unwrap();
        assert_eq!(read.image_config, Some(ImageConfig::Defaults));
    }

    #[test]
    fn a_tag_in_the_name_counts_as_a_tag() {
        let mut request = named("n:v1");
        request.tags = Some(vec!["v2".to_owned(), "v2".to_owned()]);
        let spec = check_new(request).unwrap();
        let tags: Vec<_> = spec.tags.iter().map(String::as_str).collect();
        assert_eq!((spec.name.as_str(), tags), ("n", vec!["v1", "v2"]));
        let tags = check_new(named("n")).unwrap().tags;
        assert_eq!(tags, BTreeSet::from([DEFAULT_TAG.to_owned()]));
        let alias = NewBuild {
            alias: Some("old".to_owned()),
            ..NewBuild::default()
        };
        assert_eq!(check_new(alias).unwrap().name, "old");
    }

    #[test]
    fn name_and_tag_together_fit_into_a_name_of_the_pool() {
        let of = |name: usize, tag: usize| {
            let mut request = named(&"n".repeat(name));
            request.tags = Some(vec!["t".repeat(tag)]);
            check_new(request).is_ok()
        };
        assert!(of(100, 27) && !of(100, 28) && !of(128, 1));
        let assigned = |tag: usize| check_tags(&"n".repeat(100), vec!["t".repeat(tag)]);
        assert!(assigned(27).is_ok() && assigned(28).is_err());
        assert!(check_tags("n", vec![]).is_err());
        assert!(check_tags("n", vec!["a:b".to_owned()]).is_err());
    }

    #[test]
    fn memory_is_rounded_up_and_bounded() {
        let of = |mb| {
            check_new(NewBuild {
                memory_mb: Some(mb),
                ..named("n")
            })
        };
        assert_eq!(of(513).unwrap().memory, Bytes::mib(514));
        assert_eq!(of(8192).unwrap().memory, Bytes::mib(8192));
        for wrong in [i64::MIN, -1, 0, 1, 8193, i64::MAX] {
            let message = of(wrong).unwrap_err().to_string();
            assert!(message.starts_with("memoryMB is "), "{message}");
        }
        let of = |mb| {
            check_new(NewBuild {
                min_free_disk_mb: Some(mb),
                ..named("n")
            })
        };
        for good in [0, 1, 65536] {
            let bytes = Bytes::mib(u64::try_from(good).unwrap());
            assert_eq!(of(good).unwrap().min_free_disk, bytes);
        }
        for wrong in [i64::MIN, -1, 65537, i64::MAX] {
            let message = of(wrong).unwrap_err().to_string();
            assert!(message.ends_with(": use 0 to 65536"), "{message}");
        }
        let limit = Some(Bytes::mib(1024));
        for (free, limit) in [(1024, limit), (0, limit), (65536, None)] {
            assert_eq!(check_disk_limit(Bytes::mib(free), limit), Ok(()));
        }
        let message = check_disk_limit(Bytes::mib(1025), limit).unwrap_err();
        let message = message.to_string();
        for part in ["minFreeDiskMb is 1025", "1024 MiB", "sandbox.disk"] {
            assert!(message.contains(part), "{message}");
        }
        for wrong in [i64::MIN, 0, 33] {
            let request = NewBuild {
                cpu_count: Some(wrong),
                ..named("n")
            };
            assert!(check_new(request).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_start_needs_exactly_one_origin() {
        assert!(check_start(StartBuild::default()).is_err());
        let mut both = from_image();
        both.from_template = Some("base".to_owned());
        assert!(check_start(both.clone()).is_err());
        both.from_image = Some(String::new());
        let spec = check_start(both).unwrap();
        assert_eq!(spec.from, From::Template("base".to_owned()));
    }

    #[test]
    fn malformed_steps_are_refused_with_their_number() {
        let with = |kind: &str, arg: &str, hash: Option<&str>| {
            let good = BuildStep {
                kind: "RUN".to_owned(),
                ..BuildStep::default()
            };
            let step = BuildStep {
                kind: kind.to_owned(),
                args: Some(vec![arg.to_owned()]),
                files_hash: hash.map(str::to_owned),
                force: None,
            };
            let mut start = from_image();
            start.steps = Some(vec![good, step]);
            check_start(start)
        };
        assert!(with("copy", "a", Some(&"0a".repeat(32))).is_ok());
        for (kind, arg) in [("SHELL", "a"), ("RUN", "a\0b")] {
            let message = with(kind, arg, None).unwrap_err().to_string();
            assert!(message.contains("step 2"), "{message}");
        }
        for hash in ["..", "0A", &"g".repeat(64), &"0".repeat(65)] {
            assert!(with("COPY", "a", Some(hash)).is_err(), "{hash}");
        }
    }

    #[test]
    fn credentials_become_a_name_and_a_password() {
        let of = |registry| {
            let mut start = from_image();
            start.from_image_registry = Some(registry);
            check_start(start).map(|spec| spec.credentials.unwrap().username)
        };
        let gcp = ImageRegistry::Gcp {
            service_account_json: "{}".to_owned(),
        };
        assert_eq!(of(gcp).unwrap(), "_json_key");
        let aws = ImageRegistry::Aws {
            aws_access_key_id: "k".to_owned(),
            aws_secret_access_key: "hidden".to_owned(),
            aws_region: "r".to_owned(),
        };
        let why = of(aws).unwrap_err();
        assert!(matches!(why, RequestError::Unsupported(_)));
        assert!(!why.to_string().contains("hidden"));
    }

    proptest! {
        #[test]
        fn accepted_names_are_plain_words(name in "[a-z./:_\\- \\x00-\\x1f]{0,12}", tag in "[a-z./:\\n]{0,6}") {
            let mut request = named(&name);
            request.tags = Some(vec![tag]);
            if let Ok(spec) = check_new(request) {
                let words = spec.tags.iter().chain([&spec.name]);
                for word in words {
                    prop_assert!(!word.is_empty() && !word.starts_with(['.', '/', '-']));
                    prop_assert!(word.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b)));
                }
                prop_assert!(spec.tags.iter().all(|tag| !tag.contains('/')));
            }
        }
    }
}
