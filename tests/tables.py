"""Tables such as TOML can hold, for property tests."""

from __future__ import annotations

from datetime import UTC

from hypothesis import strategies as st

plain = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(UTC))
    | st.times()
)
words = st.sampled_from("store index profile profiles path records backend options auto target_mass gpu".split())
keys = words | st.text(max_size=3)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
tables = st.dictionaries(keys, values, max_size=3)
