// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package servers

// Server is one server of Debian's. Its texts are lines of bash, with the functions of prelude.
type Server struct {
	Name     string
	Packages string
	// Start is what its unit file does, as the container's first process.
	Start string
	// Ready succeeds once it serves.
	Ready string
	// Client is a program beside the server that has a connection to it open, and ticks while it is served.
	Client string
	// Ask has the server add one to what it has, and prints how many that are; $N of them are to be.
	Ask string
}

// Table is all of them.
var Table = []Server{
	{
		Name: "apache2", Packages: "apache2 curl",
		Start:  `. /etc/apache2/envvars; mkdir -p /run/apache2; exec apache2 -DFOREGROUND -c 'MaxKeepAliveRequests 0' -c 'KeepAliveTimeout 600'`,
		Ready:  `port 80`,
		Client: `talk 80 'HEAD / HTTP/1.1\r\nHost: x\r\n\r\n' 'Content-Type'`,
		Ask:    `curl -s http://127.0.0.1/ask >/dev/null; lines /var/log/apache2/access.log /ask`,
	},
	{
		Name: "beanstalkd", Packages: "beanstalkd",
		Start:  `as beanstalkd beanstalkd -l 127.0.0.1 -p 11300`,
		Ready:  `port 11300`,
		Client: `talk 11300 'list-tube-used\r\n' USING`,
		Ask:    `request 11300 'put 0 0 60 1\r\nx\r\nquit\r\n' | awk '{ print $2 }'`, // the job's number
	},
	{
		Name: "bind9", Packages: "bind9 bind9-dnsutils",
		Start: `install -d -o bind /run/named
			echo 'zone "t.test" { type master; file "/var/lib/bind/t.test"; allow-update { 127.0.0.1; }; };' >>/etc/bind/named.conf.local
			printf '@ 60 IN SOA t.test. root.t.test. 0 60 60 60 60\n@ NS t.test.\n@ A 127.0.0.1\n' >/var/lib/bind/t.test
			chown bind /var/lib/bind/t.test
			exec named -f -u bind`,
		Ready: `dig +time=1 +tries=1 @127.0.0.1 t.test soa | grep -q 'ANSWER: 1'`,
		Ask: `printf 'server 127.0.0.1\nupdate add x%s.t.test 60 A 127.0.0.1\nsend\n' "$N" | nsupdate
			dig +short @127.0.0.1 t.test soa | awk '{ print $3 }'`, // the zone's serial number
	},
	{
		Name: "cron", Packages: "cron",
		Start: `exec cron -f`,
		Ready: `grep . /run/crond.pid`,
		Ask:   `flock -n /run/crond.pid true || echo "$N"`, // its lock is held
	},
	{
		Name: "dnsmasq", Packages: "dnsmasq-base bind9-dnsutils",
		Start: `exec dnsmasq -k -u dnsmasq -r /etc/resolv.conf --address=/t.test/127.0.0.9`,
		Ready: `port 53`,
		Ask: `[ "$(dig +short @127.0.0.1 t.test)" = 127.0.0.9 ] || exit
			hits=$(dig +short @127.0.0.1 chaos txt hits.bind | tr -d '"'); echo $(((hits + 1) / 2))`, // this one counts, too
	},
	{
		Name: "dovecot", Packages: "dovecot-imapd curl",
		Start:  `user; mkdir -p /run/dovecot; exec dovecot -F`,
		Ready:  `port 143`,
		Client: `talk 143 'a NOOP\r\n' 'a OK'`,
		Ask: `printf 'Subject: x\r\n\r\nx\r\n' >/tmp/mail; curl -s imap://u:pw@127.0.0.1/INBOX -T /tmp/mail
			curl -s imap://u:pw@127.0.0.1/INBOX -X 'STATUS INBOX (MESSAGES)' | tr -dc 0-9`,
	},
	{
		Name: "dropbear", Packages: "dropbear-bin openssh-client",
		Start:  `key; mkdir -p /etc/dropbear; exec dropbear -R -F -E`,
		Ready:  `port 22`,
		Client: `until port 22; do sleep 0.1; done; while :; do echo; sleep 0.1; done | ssh localhost cat | while read -r _; do tick; done`,
		Ask:    `ssh localhost 'echo >>/root/asked; wc -l </root/asked'`,
	},
	{
		Name: "etcd", Packages: "etcd-server etcd-client",
		Start:  `as etcd etcd --name default --data-dir /var/lib/etcd/default`,
		Ready:  `ETCDCTL_API=3 etcdctl endpoint health`,
		Client: `until port 2379; do sleep 0.1; done; ETCDCTL_API=3 etcdctl watch --prefix k >/run/watched & while kill -0 $!; do tick; done`,
		Ask: `export ETCDCTL_API=3; etcdctl put "k$N" x >/dev/null; lines /run/watched PUT >/dev/null
			etcdctl get --prefix k --keys-only | grep -c k`,
	},
	{
		Name: "gearmand", Packages: "gearman-job-server gearman-tools",
		Start:  `as gearman gearmand --listen=127.0.0.1 --log-file=stderr`,
		Ready:  `port 4730`,
		Client: `talk 4730 'version\n' OK`,
		Ask: `gearman -h 127.0.0.1 -b -f t x >/dev/null; exec 4<>/dev/tcp/127.0.0.1/4730; echo status >&4
			read -r -u 4 _ jobs _; echo "$jobs"`,
	},
	{
		Name: "gunicorn", Packages: "gunicorn curl",
		Start: `cat >/srv/app.py <<-'X'
				n = 0
				def app(environ, start):
				    global n
				    n += environ["PATH_INFO"] == "/ask"
				    start("200 OK", [("Content-Type", "text/plain")])
				    return [str(n).encode()]
			X
			cd /srv; exec gunicorn --bind 127.0.0.1:8000 app:app`,
		Ready: `port 8000`,
		Ask:   `curl -s http://127.0.0.1:8000/ask`,
	},
	{
		Name: "haproxy", Packages: "haproxy curl", // its own configuration has it change its root
		Start: `mkdir -p /run/haproxy
			cat >>/etc/haproxy/haproxy.cfg <<-'X'
			frontend f
				bind 127.0.0.1:80
				timeout client 10m
				timeout http-keep-alive 10m
				stick-table type string size 100 store http_req_cnt
				http-request track-sc0 path
				http-request return status 200 content-type text/plain lf-string "%[sc_http_req_cnt(0)]"
			X
			exec haproxy -Ws -f /etc/haproxy/haproxy.cfg -p /run/haproxy.pid`,
		Ready:  `port 80`,
		Client: `talk 80 'HEAD / HTTP/1.1\r\nHost: x\r\n\r\n' 'content-type'`,
		Ask:    `curl -s http://127.0.0.1/ask`,
	},
	{
		Name: "influxdb", Packages: "influxdb influxdb-client curl",
		Start: `as influxdb influxd -config /etc/influxdb/influxdb.conf`,
		Ready: `port 8086`,
		Ask: `curl -s -XPOST 'http://127.0.0.1:8086/query' --data-urlencode 'q=create database t' >/dev/null
			curl -s 'http://127.0.0.1:8086/write?db=t' --data-binary "m v=1 $N"
			influx -database t -execute 'select count(v) from m' | awk 'END { print $2 }'`,
	},
	{
		Name: "lighttpd", Packages: "lighttpd curl",
		Start: `install -d -o www-data /run/lighttpd; lighttpd-enable-mod accesslog >/dev/null
			printf 'server.max-keep-alive-requests = 0\nserver.max-keep-alive-idle = 600\n' >>/etc/lighttpd/lighttpd.conf
			exec lighttpd -D -f /etc/lighttpd/lighttpd.conf`,
		Ready: `port 80`,
		Ask:   `curl -s http://127.0.0.1/ask >/dev/null; lines /var/log/lighttpd/access.log /ask`,
	},
	{
		Name: "mariadb", Packages: "mariadb-server",
		Start:  `install -d -o mysql /run/mysqld; as mysql mariadbd`,
		Ready:  `mariadb-admin ping`,
		Client: mariadbClient, Ask: mariadbAsk,
	},
	{
		Name: "mariadb without its own asynchronous IO", Packages: "mariadb-server",
		Start:  `install -d -o mysql /run/mysqld; as mysql mariadbd --innodb-use-native-aio=0`,
		Ready:  `mariadb-admin ping`,
		Client: mariadbClient, Ask: mariadbAsk,
	},
	{
		Name: "memcached", Packages: "memcached",
		Start:  `install -d -o memcache /run/memcached; exec /usr/share/memcached/scripts/systemd-memcached-wrapper /etc/memcached.conf`,
		Ready:  `port 11211`,
		Client: `talk 11211 'version\r\n' VERSION`,
		Ask:    `request 11211 'add n 0 0 1\r\n0\r\nincr n 1\r\nquit\r\n' | tail -1`,
	},
	{
		Name: "mosquitto", Packages: "mosquitto mosquitto-clients",
		Start:  `install -d -o mosquitto /run/mosquitto /var/log/mosquitto; exec mosquitto -c /etc/mosquitto/mosquitto.conf`,
		Ready:  `port 1883`,
		Client: `until port 1883; do sleep 0.1; done; mosquitto_sub -t t >/run/got & sleep 1; while kill -0 $!; do tick; done`,
		Ask:    `mosquitto_pub -t t -m x; lines /run/got x`,
	},
	{
		Name: "nats-server", Packages: "nats-server curl",
		Start:  `as nobody nats-server -a 127.0.0.1 -m 8222`,
		Ready:  `port 4222`,
		Client: `talk 4222 'PING\r\n' PONG`,
		Ask: `exec 4<>/dev/tcp/127.0.0.1/4222; printf 'CONNECT {}\r\nPUB t 1\r\nx\r\nPING\r\n' >&4
			until read -r -u 4 line; [[ $line == PONG* ]]; do :; done
			curl -s http://127.0.0.1:8222/varz | awk '/"in_msgs"/ { print $2 + 0 }'`,
	},
	{
		Name: "nginx", Packages: "nginx-light curl",
		Start:  `echo 'keepalive_requests 1000000; keepalive_timeout 600;' >/etc/nginx/conf.d/long.conf; exec nginx -g 'daemon off;'`,
		Ready:  `port 80`,
		Client: `talk 80 'HEAD / HTTP/1.1\r\nHost: x\r\n\r\n' 'Content-Type'`,
		Ask:    `curl -s http://127.0.0.1/ask >/dev/null; lines /var/log/nginx/access.log /ask`,
	},
	{
		Name: "nodejs", Packages: "nodejs curl",
		Start: `exec node -e 'let n = 0; require("http").createServer({keepAliveTimeout: 600000},
			(q, s) => s.end(String(q.url == "/ask" ? ++n : n))).listen(8080, "127.0.0.1")'`,
		Ready:  `port 8080`,
		Client: `talk 8080 'HEAD / HTTP/1.1\r\nHost: x\r\n\r\n' 'HTTP'`,
		Ask:    `curl -s http://127.0.0.1:8080/ask`,
	},
	{
		Name: "openssh-server", Packages: "openssh-server openssh-client",
		Start:  `key; mkdir -p /run/sshd; exec /usr/sbin/sshd -D`,
		Ready:  `port 22`,
		Client: `until port 22; do sleep 0.1; done; while :; do echo; sleep 0.1; done | ssh localhost cat | while read -r _; do tick; done`,
		Ask:    `ssh localhost 'echo >>/root/asked; wc -l </root/asked'`,
	},
	{
		Name: "php-fpm", Packages: "php8.2-fpm libfcgi-bin",
		Start: `install -d -o www-data /run/php; install -d -o www-data /srv/www
			echo '<?php file_put_contents("/srv/www/n", "x", FILE_APPEND | LOCK_EX); clearstatcache(); echo filesize("/srv/www/n"), "\n";' >/srv/www/n.php
			exec php-fpm8.2 --nodaemonize --fpm-config /etc/php/8.2/fpm/php-fpm.conf`,
		Ready: `[ -S /run/php/php8.2-fpm.sock ]`,
		Ask:   `SCRIPT_FILENAME=/srv/www/n.php REQUEST_METHOD=GET cgi-fcgi -bind -connect /run/php/php8.2-fpm.sock | tail -1`,
	},
	{
		Name: "postfix", Packages: "postfix",
		Start: `postconf -e myhostname=t.test mydestination=t.test,localhost maillog_file=/var/log/mail.log compatibility_level=3.6; newaliases
			exec postfix start-fg`,
		Ready:  `port 25`,
		Client: `talk 25 'NOOP\r\n' 250`,
		Ask:    `printf 'Subject: x\n\nx\n' | sendmail root@localhost; lines /var/mail/root '^From '`,
	},
	{
		Name: "postgresql", Packages: "postgresql-15",
		Start: `install -d -o postgres -g postgres -m 2775 /run/postgresql
			as postgres /usr/lib/postgresql/15/bin/postgres -D /var/lib/postgresql/15/main -c config_file=/etc/postgresql/15/main/postgresql.conf`,
		Ready: `runuser -u postgres -- psql -qtAc 'select 1'`,
		Client: `until [ -S /run/postgresql/.s.PGSQL.5432 ]; do sleep 0.1; done; sleep 1
			(echo 'select pg_advisory_lock(7);'; while :; do echo 'select 1;'; sleep 0.1; done) |
			runuser -u postgres -- psql -qtA | while read -r _; do tick; done`,
		Ask: `runuser -u postgres -- psql -qtA -c 'create table if not exists t (x int)' -c 'insert into t values (1)' \
			-c "select count(*) from t where exists (select from pg_locks where locktype = 'advisory' and granted)" 2>/dev/null`,
	},
	{
		Name: "prometheus", Packages: "prometheus curl",
		Start: `cd /var/lib/prometheus; as prometheus prometheus --config.file=/etc/prometheus/prometheus.yml --storage.tsdb.path=/var/lib/prometheus/metrics2 --web.listen-address=127.0.0.1:9090`,
		Ready: `[ "$(curl -s http://127.0.0.1:9090/-/ready -o /dev/null -w '%{http_code}')" = 200 ]`,
		Ask: `curl -s http://127.0.0.1:9090/-/healthy >/dev/null
			curl -s http://127.0.0.1:9090/metrics | awk '/^prometheus_http_requests_total.*"\/-\/healthy"/ { print $2 }'`,
	},
	{
		Name: "rabbitmq", Packages: "rabbitmq-server",
		Start: `export RABBITMQ_NODENAME=rabbit@localhost; as rabbitmq /usr/lib/rabbitmq/bin/rabbitmq-server`,
		Ready: `RABBITMQ_NODENAME=rabbit@localhost rabbitmqctl -q await_startup`,
		Ask: `export RABBITMQ_NODENAME=rabbit@localhost; rabbitmqctl -q add_vhost "v$N"
			rabbitmqctl -q list_vhosts | grep -c '^v[0-9]'`,
	},
	{
		Name: "redis", Packages: "redis-server",
		Start:  `install -d -o redis /run/redis; as redis redis-server /etc/redis/redis.conf --daemonize no`,
		Ready:  `port 6379`,
		Client: `talk 6379 'PING\r\n' +PONG`,
		Ask:    `redis-cli incr n`,
	},
	{
		Name: "rsync", Packages: "rsync",
		Start: `mkdir -p /srv/r; printf '[r]\npath = /srv/r\nread only = no\nuid = root\n' >/etc/rsyncd.conf; exec rsync --daemon --no-detach`,
		Ready: `port 873`,
		Ask:   `cp /etc/hostname "/tmp/f$N"; rsync "/tmp/f$N" rsync://127.0.0.1/r/; rsync rsync://127.0.0.1/r/ | grep -c ' f[0-9]*$'`,
	},
	{
		Name: "rsyslog", Packages: "rsyslog",
		Start: `exec rsyslogd -n -iNONE`,
		Ready: `[ -S /dev/log ]`,
		Ask:   `logger -t ask x; lines /var/log/syslog ' ask: '`,
	},
	{
		Name: "samba", Packages: "samba smbclient",
		Start: `mkdir -p /run/samba /srv/s; chmod 777 /srv/s
			printf '[global]\nmap to guest = bad user\n[s]\npath = /srv/s\nguest ok = yes\nread only = no\n' >/etc/samba/smb.conf
			exec smbd --foreground --no-process-group`,
		Ready: `port 445`,
		Ask: `smbclient -N //127.0.0.1/s -c "put /etc/hostname f$N" >/dev/null 2>&1
			smbclient -N //127.0.0.1/s -c ls 2>/dev/null | grep -c ' f[0-9]'`,
	},
	{
		Name: "slapd", Packages: "slapd ldap-utils",
		Start: `install -d -o openldap /run/slapd; exec slapd -h 'ldap:/// ldapi:///' -g openldap -u openldap -F /etc/ldap/slapd.d -d 0`,
		Ready: `ldapsearch -QY EXTERNAL -H ldapi:/// -b cn=config -s base`,
		Ask: `printf 'dn: cn=x%s,cn=schema,cn=config\nobjectClass: olcSchemaConfig\ncn: x%s\n' "$N" "$N" | ldapadd -QY EXTERNAL -H ldapi:/// >/dev/null
			ldapsearch -LLLQY EXTERNAL -H ldapi:/// -b cn=schema,cn=config dn | grep -c '}x[0-9]'`,
	},
	{
		Name: "snmpd", Packages: "snmpd snmp",
		Start: `echo 'rocommunity all' >>/etc/snmp/snmpd.conf; exec snmpd -LOw -u Debian-snmp -g Debian-snmp -I -smux,mteTrigger,mteTriggerConf -f`,
		Ready: `snmpget -v2c -call -t1 -r0 127.0.0.1 .1.3.6.1.2.1.1.1.0`,
		Ask:   `n=$(snmpget -Oqv -v2c -call 127.0.0.1 .1.3.6.1.2.1.11.1.0); [ "$N" = 1 ] && echo $((n - 1)) >/run/first; echo $((n - $(cat /run/first)))`,
	},
	{
		Name: "squid", Packages: "squid curl",
		Start:  `exec squid --foreground -sYC`,
		Ready:  `port 3128`,
		Client: `talk 3128 'HEAD http://127.0.0.1/client HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n' 'Content-Type'`,
		Ask:    `curl -s -x http://127.0.0.1:3128 http://127.0.0.1/ask >/dev/null; lines /var/log/squid/access.log /ask`,
	},
	{
		Name: "tomcat", Packages: "tomcat10 curl",
		Start: `echo '<%! static int n; %><%= ++n %>' >/var/lib/tomcat10/webapps/ROOT/n.jsp
			export CATALINA_HOME=/usr/share/tomcat10 CATALINA_BASE=/var/lib/tomcat10 CATALINA_TMPDIR=/tmp JAVA_OPTS=-Djava.awt.headless=true
			as tomcat /usr/libexec/tomcat10/tomcat-start.sh`,
		Ready: `[ "$(curl -s http://127.0.0.1:8080/ -o /dev/null -w '%{http_code}')" = 200 ]`,
		Ask:   `curl -s http://127.0.0.1:8080/n.jsp`,
	},
	{
		Name: "tor", Packages: "tor",
		Start: `install -d -o debian-tor -m 2755 /run/tor; printf 'ControlPort 9051\nCookieAuthentication 0\n' >>/etc/tor/torrc
			exec tor --defaults-torrc /usr/share/tor/tor-service-defaults-torrc -f /etc/tor/torrc --RunAsDaemon 0`,
		Ready:  `port 9051`,
		Client: `talk 9051 'AUTHENTICATE\r\n' '250 OK'`,
		Ask: `request 9051 'AUTHENTICATE\r\nADD_ONION NEW:ED25519-V3 Flags=Detach,DiscardPK Port=80\r\nGETINFO onions/detached\r\nQUIT\r\n' |
			grep -cE '^(250-onions/detached=)?[a-z2-7]{56}$'`,
	},
	{
		Name: "unbound", Packages: "unbound dns-root-data",
		Start: `install -o unbound -g unbound /usr/share/dns/root.key /var/lib/unbound/root.key; exec unbound -d -p`,
		Ready: `unbound-control status`,
		Ask:   `unbound-control local_data "x$N.t.test 60 A 127.0.0.1" >/dev/null; unbound-control list_local_data | grep -c '^x.*t\.test'`,
	},
	{
		Name: "uwsgi", Packages: "uwsgi-core uwsgi-plugin-python3 curl",
		Start: `cat >/srv/app.py <<-'X'
				n = 0
				def application(environ, start):
				    global n
				    n += environ["PATH_INFO"] == "/ask"
				    start("200 OK", [("Content-Type", "text/plain")])
				    return [str(n).encode()]
			X
			exec uwsgi --plugin python3 --master --enable-threads --uid www-data --http-socket 127.0.0.1:8000 --wsgi-file /srv/app.py`,
		Ready: `port 8000`,
		Ask:   `curl -s http://127.0.0.1:8000/ask`,
	},
	{
		Name: "varnish", Packages: "varnish curl",
		Start: `printf 'vcl 4.1;\nimport std;\nbackend default none;\nsub vcl_recv { return (synth(200)); }\n' >/etc/varnish/default.vcl
			exec varnishd -F -a :6081 -f /etc/varnish/default.vcl -p feature=+http2 -s malloc,256m`,
		Ready: `port 6081`,
		Ask: `[ "$N" = 1 ] && varnishstat -1 -f MAIN.s_synth | awk '{ print $2 }' >/run/first; curl -s http://127.0.0.1:6081/ask >/dev/null
			echo $(($(varnishstat -1 -f MAIN.s_synth | awk '{ print $2 }') - $(cat /run/first)))`,
	},
	{
		Name: "vsftpd", Packages: "vsftpd curl",
		// It ends once it is the parent of a process that it did not start, as a container's first process is.
		Start:  `user; mkdir -p /run/vsftpd/empty; echo write_enable=YES >>/etc/vsftpd.conf; vsftpd /etc/vsftpd.conf & wait $!`,
		Ready:  `port 21`,
		Client: `talk 21 'USER u\r\nPASS pw\r\n' 230`, // before that it may open no file, which CRIU must
		Ask: `curl -sT /etc/hostname "ftp://u:pw@127.0.0.1/f$N"
			curl -sl ftp://u:pw@127.0.0.1/ | grep -c '^f[0-9]'`,
	},
}

const (
	mariadbClient = `until [ -S /run/mysqld/mysqld.sock ]; do sleep 0.1; done; sleep 1
			(echo "select get_lock('l', 0);"; while :; do echo 'select 1;'; sleep 0.1; done) |
			mariadb -nN | while read -r _; do tick; done`
	mariadbAsk = `mariadb -N -e "create database if not exists d; create table if not exists d.t (x int); insert into d.t values (1);
			select count(*) from d.t where is_used_lock('l') is not null"`
)

// prelude has functions for the texts of the table.
const prelude = `exec </dev/null
as() { # USER COMMAND...: goes on as a user, with its groups and home
	local user=$1
	shift
	HOME=$(getent passwd "$user" | cut -d: -f6) exec setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups -- "$@"
}
user() { # a user u with a home and the password pw
	useradd -m -s /bin/bash u
	echo u:pw | chpasswd
}
key() { # root may log in by ssh with a key
	mkdir -p -m 700 /root/.ssh
	ssh-keygen -q -N '' -t ed25519 -f /root/.ssh/id_ed25519
	cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
	printf 'StrictHostKeyChecking no\nLogLevel ERROR\n' >/root/.ssh/config
}
port() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
lines() { # FILE TEXT: how many lines of a log have a text; waits for those that are to be
	until [ "$(grep -c -e "$2" "$1")" -ge "$N" ]; do sleep 0.1; done
	grep -c -e "$2" "$1"
}
request() { # PORT TEXT: what is answered until the server ends the connection
	exec 4<>"/dev/tcp/127.0.0.1/$1"
	printf "$2" >&4
	tr -d '\r' <&4
}
tick() { echo $((++ticks)) >/run/ticks; sleep 0.1; }
talk() { # PORT TEXT ANSWER: one connection, and a tick for each line that begins with the answer
	until port "$1"; do sleep 0.1; done
	exec 3<>"/dev/tcp/127.0.0.1/$1"
	while printf "$2" >&3; do
		while :; do
			read -r line <&3 || return
			[[ $line != "$3"* ]] || break
		done
		tick
	done
}
`
