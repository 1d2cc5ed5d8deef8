from pilotage.algorithms.versions import WeightsVersions


def test_each_publish_is_one_more() -> None:
    versions = WeightsVersions()
    assert (versions.current, versions.is_published) == (0, True)

    versions.changed()
    assert not versions.is_published
    assert versions.advance() == 1
    versions.published()

    assert (versions.current, versions.is_published) == (1, True)
    assert versions.advance() == 2  # without a change too: the sampler cannot know


def test_weights_that_were_published_keep_their_version_after_a_load() -> None:
    versions = WeightsVersions()
    versions.restored(7, is_published=True)

    assert versions.advance() == 7
    versions.published()
    assert versions.advance() == 8


def test_weights_that_were_never_published_get_a_version_of_their_own_after_a_load() -> None:
    versions = WeightsVersions()
    versions.restored(7, is_published=False)
    assert not versions.is_published
    assert versions.advance() == 8


def test_a_change_after_a_load_takes_the_old_version_away() -> None:
    versions = WeightsVersions()
    versions.restored(7, is_published=True)
    versions.changed()
    assert versions.advance() == 8
