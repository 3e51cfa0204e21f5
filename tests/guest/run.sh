# Inside the guest: installs the wheel as a user would, then runs the tests on it.
python3 -m pip install --quiet --no-index --no-deps --break-system-packages --root-user-action=ignore ./*.whl || exit 4
exec python3 -m pytest -q -p no:cacheprovider --rootdir=tests -o junit_family=xunit1 --junitxml=out/junit.xml "$@" tests
