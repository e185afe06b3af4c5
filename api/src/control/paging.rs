//! Paging of lists.
//!
//! A page token encodes the position of the page's last item in the sorted list. Therefore no item is repeated or
//! skipped when other items are added or removed between two requests. Clients must treat tokens as opaque.

use axum::http::{HeaderMap, HeaderValue};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};

use super::{error::ApiError, query::Query};

/// Maximum and default number of items on a page.
const MAX_PAGE: usize = 100;

/// Position of an item in a list, which is sorted by time, then by id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) at: u64,
    pub(super) id: String,
}

/// Sort order of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Asc,
    Desc,
}

/// The requested page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Page {
    limit: usize,
    order: Order,
    after: Option<Position>,
}

impl Page {
    /// Parses `limit`, `order` and `nextToken`.
    pub(super) fn of(query: &Query) -> Result<Self, ApiError> {
        let order = match query.get("order") {
            None | Some("desc") => Order::Desc,
            Some("asc") => Order::Asc,
            Some(other) => {
                let wrong = format!("order is {other:?}: use asc or desc");
                return Err(ApiError::BadRequest(wrong));
            }
        };
        Self::with(query, MAX_PAGE, order, "nextToken")
    }

    /// Parses `limit` and the token in the parameter `token`.
    pub(super) fn with(
        query: &Query,
        usual: usize,
        order: Order,
        token: &str,
    ) -> Result<Self, ApiError> {
        let limit = query.number("limit")?.unwrap_or(usual);
        if !(1..=MAX_PAGE).contains(&limit) {
            let wrong = format!("limit is {limit}: use a number from 1 to {MAX_PAGE}");
            return Err(ApiError::BadRequest(wrong));
        }
        let after = query.get(token).map(read_token).transpose()?;
        Ok(Self {
            limit,
            order,
            after,
        })
    }

    /// Sorts all items of the list and returns the items of the page and, unless it is the last page, the token of the
    /// next page.
    pub(super) fn cut<T>(
        &self,
        items: Vec<T>,
        position: impl Fn(&T) -> Position,
    ) -> (Vec<T>, Option<String>) {
        let mut items: Vec<_> = items.into_iter().map(|i| (position(&i), i)).collect();
        items.sort_by(|(a, _), (b, _)| match self.order {
            Order::Asc => a.cmp(b),
            Order::Desc => b.cmp(a),
        });
        items.retain(|(at, _)| match (&self.after, self.order) {
            (None, _) => true,
            (Some(after), Order::Asc) => at > after,
            (Some(after), Order::Desc) => at < after,
        });
        let has_more = items.len() > self.limit;
        items.truncate(self.limit);
        let last = items.last().filter(|_| has_more);
        let next = last.map(|(at, _)| token(at));
        (items.into_iter().map(|(_, item)| item).collect(), next)
    }
}

/// The token of the page after this position.
pub(super) fn token(position: &Position) -> String {
    URL_SAFE_NO_PAD.encode(format!("1:{}:{}", position.at, position.id))
}

fn read_token(token: &str) -> Result<Position, ApiError> {
    let wrong = || {
        ApiError::BadRequest("the token of the page is invalid: use a token of this server".into())
    };
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| wrong())?;
    let text = String::from_utf8(bytes).map_err(|_| wrong())?;
    let (at, id) = text
        .strip_prefix("1:")
        .and_then(|rest| rest.split_once(':'))
        .ok_or_else(wrong)?;
    Ok(Position {
        at: at.parse().map_err(|_| wrong())?,
        id: id.to_owned(),
    })
}

/// Adds the token of the next page, unless this is the last page.
pub(super) fn put_token(headers: &mut HeaderMap, token: Option<String>) -> Result<(), ApiError> {
    let Some(token) = token else {
        return Ok(());
    };
    let value = HeaderValue::try_from(token);
    let value = value.map_err(|why| ApiError::BadRequest(why.to_string()))?;
    headers.insert("x-next-token", value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn position(item: &(u64, u8)) -> Position {
        Position {
            at: item.0,
            id: item.1.to_string(),
        }
    }

    fn walk(items: &[(u64, u8)], order: &str, limit: usize) -> Vec<(u64, u8)> {
        let mut all = Vec::new();
        let mut token = None;
        for _ in 0..=items.len() {
            let mut text = format!("limit={limit}&order={order}");
            if let Some(token) = &token {
                text = format!("{text}&nextToken={token}");
            }
            let page = Page::of(&Query::parse(&text)).unwrap();
            let (cut, next) = page.cut(items.to_vec(), position);
            assert!(cut.len() <= limit);
            all.extend(cut);
            token = next;
            if token.is_none() {
                break;
            }
        }
        assert!(token.is_none(), "the list has no last page");
        all
    }

    proptest! {
        #[test]
        fn all_pages_together_are_the_list(times in prop::collection::vec(0_u64..5, 0..30), limit in 1_usize..8) {
            let items: Vec<_> = times.into_iter().zip(0_u8..).collect();
            let mut expected = items.clone();
            expected.sort_by_key(position);
            prop_assert_eq!(&walk(&items, "asc", limit), &expected);
            expected.reverse();
            prop_assert_eq!(&walk(&items, "desc", limit), &expected);
        }

        #[test]
        fn no_token_panics(token in "[A-Za-z0-9_-]{0,40}") {
            let _ = read_token(&token);
        }
    }

    #[test]
    fn invalid_page_parameters_are_refused() {
        for wrong in [
            "limit=0",
            "limit=101",
            "limit=x",
            "order=up",
            "nextToken=AAAA",
        ] {
            assert!(Page::of(&Query::parse(wrong)).is_err(), "{wrong}");
        }
    }
}
